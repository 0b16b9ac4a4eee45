"""RunOptions: how to run, in one value that is checked before any work is done."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decodescope.analysis.guard_rules import parse_guard
from decodescope.errors import InputError
from decodescope.observe.recorder import Detail
from decodescope.sampling.params import SamplingParams, resolve
from decodescope.text.stream import StopStrings

DEFAULT_CANDIDATES = 50
_OF_GREEDY_ALONE = ("note.seed_greedy", "note.filter_greedy")  # untrue as soon as a guard makes a run draw


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: sampling values by name (see `sampling.params`), and everything around them.

    Raises InputError for values that cannot be, before a model is loaded.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_settings: bool = False  # start from the checkpoint's generation_config
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    use_cache: bool = True
    candidates: int = DEFAULT_CANDIDATES  # recorded per step
    save: Path | str | None = None  # run folder; one per row, numbered, where there are several prompts
    keep_logits: bool = False  # store the raw logits of every step in the run folder
    logits_bytes: int = 1 << 30  # of these at most; later steps go without
    stage_probs: bool = False  # the candidates' probabilities after every sampler stage
    guards: tuple[str, ...] = ()  # what steps in: see `analysis.guards.parse_guard`
    reuse_cache: bool = False  # take over what the newest run has computed of the same beginning
    prefill_chunk: int = 512  # positions of a long prompt in one pass
    every_logit: bool = False  # compute those of every prompt position, which no token is chosen from

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError("run.max_new_tokens", value=self.max_new_tokens)
        if self.candidates < 1:
            raise InputError("run.candidates", value=self.candidates)
        if self.prefill_chunk < 1:
            raise InputError("run.prefill_chunk", value=self.prefill_chunk)
        if self.keep_logits and self.save is None:
            raise InputError("run.keep_needs_save")
        resolve(self.sampling)
        StopStrings(self.stop)
        for guard in self.guards:
            parse_guard(guard)

    @property
    def detail(self) -> Detail:
        """How much of each step is recorded."""
        return Detail(self.candidates, self.stage_probs, self.logits_bytes if self.keep_logits else 0)


def changed(options: RunOptions, changes: Mapping[str, Any]) -> RunOptions:
    """Options with some changed: by their own names, and sampling values by theirs."""
    own = {name: value for name, value in changes.items() if name in RunOptions.__slots__}
    named = {name: value for name, value in changes.items() if name not in own}
    sampling = {**options.sampling, **own.pop("sampling", {}), **named}
    return replace(options, **own, sampling=sampling)


def guarded(params: SamplingParams, guards: Sequence[str]) -> SamplingParams:
    """Settings under guards: greedy ones that these may make draw have a seed, so that the run can be repeated."""
    if not params.is_greedy or not any(parse_guard(guard).applied(params.temperature) for guard in guards):
        return params
    notes = tuple(note for note in params.notes if note not in _OF_GREEDY_ALONE)
    return replace(params, seed=secrets.randbits(32) if params.seed is None else params.seed, notes=notes)
