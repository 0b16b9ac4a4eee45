"""A fork beside a fresh prefill: are its logits those of a run that was never forked?"""

from collections.abc import Iterator

import torch
from torch import Tensor

from decodescope.analysis.departure import TOLERANCES
from decodescope.experiments.fork_records import Verification
from decodescope.model.cache_formats import FORMATS
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.trace.records import Trace

_PREFILL_CHUNK = 512  # positions per pass
_CHUNK = 128  # of those whose logits are wanted: all of these are in memory at once


def verified(model: CausalLM, trace: Trace, step: int) -> Verification:
    """The recorded logits of a branch from `step` on, against a prefill of its prompt and tokens from nothing."""
    run, path = trace.run, trace.path()
    own, held = path[step:], FORMATS[run.cache_dtype or run.dtype]
    ids = [token.token_id for token in trace.run.prompt_tokens] + [each.token_id for each in path]
    differences, best_differs_at, compared, largest_logit = [], [], 0, 0.0
    for recorded, logits in zip(own, _fresh_logits(model, held, ids, len(ids) - len(own)), strict=True):
        candidates = recorded.candidates
        there = logits[[each.token_id for each in candidates]]
        here = torch.tensor([each.logit for each in candidates], dtype=there.dtype)
        differences.append(float((here - there).abs().max()))
        largest_logit = max(largest_logit, float(here.abs().max()))
        compared += len(candidates)
        if int(logits.argmax()) != candidates[0].token_id:
            best_differs_at.append(recorded.step)
    coarsest = max(
        TOLERANCES.get(each, TOLERANCES["bfloat16"]) for each in (run.dtype, run.cache_dtype or run.dtype)
    )
    tolerance = coarsest * largest_logit
    largest = float(torch.tensor(differences or [0.0], dtype=torch.float64).max())  # NaN where there is one
    return Verification(
        compared, tuple(differences), largest, tolerance, tuple(best_differs_at), agrees=largest <= tolerance
    )


def _fresh_logits(model: CausalLM, held: torch.dtype, ids: list[int], first: int) -> Iterator[Tensor]:
    """The logits [V] that the tokens from index `first` on were chosen from, in float32."""
    cache, device = KVCache(model.config.num_hidden_layers, held), model.device
    for start in range(0, first - 1, _PREFILL_CHUNK):
        model(torch.tensor([ids[start : min(start + _PREFILL_CHUNK, first - 1)]], device=device), cache)
    for start in range(first - 1, len(ids) - 1, _CHUNK):
        part = torch.tensor([ids[start : min(start + _CHUNK, len(ids) - 1)]], device=device)
        yield from model(part, cache, every_logit=True)[0].detach().to("cpu", torch.float32)
