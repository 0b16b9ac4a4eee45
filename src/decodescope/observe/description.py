"""The header of a run: everything that was known and settled before its first step."""

import platform
from dataclasses import replace
from datetime import UTC, datetime

import torch

import decodescope
from decodescope.generate import Limits
from decodescope.model.cache_formats import name_of
from decodescope.model.cost import CACHE_FORMATS, kv_bytes_per_token
from decodescope.model.decoder import CausalLM
from decodescope.model.placement import devices_of
from decodescope.models import ModelFiles
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from decodescope.text.chat import Prompt
from decodescope.trace.records import GUARDS, PromptToken, Run, Setting


def describe_run(
    files: ModelFiles, model: CausalLM, limits: Limits, stop_strings: tuple[str, ...], notes: tuple[str, ...]
) -> Run:
    """What all rows of a run have in common; `notes` are catalogue keys of things the reader should know."""
    config, dtype = model.config, name_of(model.dtype)
    held = name_of(limits.cache_dtype or model.dtype)
    return Run(
        model=files.name,
        source=files.source,
        path=str(files.path),
        revision=files.revision,
        sha256=files.sha256,
        architecture=config.architecture,
        dtype=dtype,
        device=", ".join(map(str, devices_of(model))),
        attention="sdpa",
        use_cache=limits.use_cache,
        prompt_text="",
        prompt_tokens=(),
        settings=(),
        stop_ids=tuple(sorted(limits.stop_ids)),
        stop_strings=stop_strings,
        max_new_tokens=limits.max_new_tokens,
        kv_bytes_per_token=kv_bytes_per_token(config, *CACHE_FORMATS[held]),
        vocabulary=config.vocab_size,
        versions=_versions(),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        notes=notes,
        weights=model.held_as,
        cache_dtype=held if limits.use_cache and held != dtype else None,
    )


def for_row(run: Run, prompt: Prompt, sampler: Sampler, guards: tuple[str, ...] = ()) -> Run:
    """The header of one row: with its own prompt, the settings and seed of its sampler, and its notes."""
    tokens = tuple(
        PromptToken(position, t.id, t.text, t.bytes.hex(), t.role, t.injected, t.partial)
        for position, t in enumerate(prompt.tokens)
    )
    params = sampler.params
    # A seed that was drawn is told, so that the run can be repeated.
    seed = params.seed if params.is_greedy else sampler.seed
    settings = settings_of(replace(params, seed=seed), guards)
    notes = params.notes + run.notes
    return replace(run, prompt_text=prompt.text, prompt_tokens=tokens, settings=settings, notes=notes)


def settings_of(params: SamplingParams, guards: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """Every value in force and its origin."""
    own = tuple(Setting(name, value, params.origin(name)) for name, value in params.values().items())
    return own + (Setting(GUARDS, " ".join(guards), "command line"),) * bool(guards)


def _versions() -> dict[str, str]:
    return {
        "decodescope": decodescope.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
