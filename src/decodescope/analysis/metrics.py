"""A run in a few numbers, from its trace alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decodescope.trace.records import Run, Step

_LARGEST_EXPONENT = 700.0
RECENT_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Means over the steps of one branch; the raw distribution's values, in nats.

    `perplexity` is exp of minus the mean log-probability of the chosen tokens. `cache_bytes` is measured,
    `cache_formula_bytes` is the formula's value for the same number of tokens.
    """

    entropy_nats_mean: float
    perplexity: float
    prefill_s: float
    cache_tokens: int
    cache_bytes: int
    cache_formula_bytes: int


def run_metrics(run: Run, steps: Sequence[Step]) -> RunMetrics:
    """Sum up the steps of one branch. Raises ValueError for none."""
    if not steps:
        raise ValueError("no steps to sum up")
    logprob = _mean([step.logprob_nats for step in steps])
    kv = steps[-1].kv
    return RunMetrics(
        entropy_nats_mean=_mean([step.entropy_nats for step in steps]),
        perplexity=math.exp(-logprob) if logprob > -_LARGEST_EXPONENT else math.inf,
        prefill_s=steps[0].timing.forward_s,
        cache_tokens=kv.tokens,
        cache_bytes=kv.used_bytes,
        cache_formula_bytes=run.kv_bytes_per_token * kv.tokens,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def recent_text(steps: Sequence[Step]) -> str:
    """The last `RECENT_CHARACTERS` characters of a branch, without joining all of a long one."""
    pieces: list[str] = []
    length = 0
    for step in reversed(steps):
        pieces.append(step.delta_text)
        length += len(step.delta_text)
        if length >= RECENT_CHARACTERS:
            break
    return "".join(reversed(pieces))[-RECENT_CHARACTERS:]


def drawn_stretch(step: Step) -> tuple[float, float] | None:
    """Where the draw of a step fell on the cumulative bar of the final distribution, most probable first: both
    ends, from 0 to 1. None where nothing was drawn, or the draw was overruled by hand."""
    if step.mass_above is None:
        return None
    return step.mass_above, min(step.mass_above + step.prob_final, 1.0)
