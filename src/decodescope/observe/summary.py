"""One choice, summed up: the raw distribution, the candidates, and what each sampler stage left.

Entropy is -sum p ln p in nats; everything is computed from float32 logits with log-sum-exp, never from log(p).
numpy does the passes over the vocabulary: on one thread, so that watching never waits for a thread pool.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from decodescope.sampling.sampler import Choice
from decodescope.trace.records import Candidate, Stage

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_FAR_BELOW = np.float32(-1e4)  # nothing is left of exp() here, and 0 times this is 0, not NaN

_GROUPS = 256

Spelling = Callable[[int], tuple[str, str]]  # token id -> (text, bytes in hexadecimal)


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one step; names and units as in `trace.records.Step`."""

    rank: int
    logprob_nats: float
    prob: float
    prob_final: float
    entropy_nats: float
    margin_logits: float
    candidates: tuple[Candidate, ...]
    stages: tuple[Stage, ...]
    mass_above: float | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """What lies behind logits [V]: log-sum-exp and entropy, and the ids that are not removed (None: all)."""

    lse: float
    entropy_nats: float
    survivors: int
    alive: Ids | None

    @classmethod
    def of(cls, logits: Logits, among: Ids | None = None) -> "Distribution":
        """Measure logits [V]; ids at -inf have no part in it, nor any outside `among` (None: all ids)."""
        alive = _alive(logits, among)
        values = logits if alive is None else logits[alive]
        peak = values.max()
        with np.errstate(over="ignore"):
            below = values - peak
            if values.min() - peak < _FAR_BELOW:
                np.maximum(below, _FAR_BELOW, out=below)
        weights = np.exp(below)
        total = float(weights.sum(dtype=np.float64))
        below *= weights
        mean_below = float(below.sum(dtype=np.float64)) / total
        entropy = max(math.log(total) - mean_below, 0.0)
        return cls(math.log(total) + float(peak), entropy, len(values), alive)

    def probs(self, logits: Logits) -> Logits:
        """The probabilities of some of its logits."""
        probs: Logits = np.exp(logits - np.float32(self.lse))
        return probs


def _alive(logits: Logits, among: Ids | None) -> Ids | None:
    """The ids at more than -inf, None where that is all of them; a chain of filters only ever removes."""
    if among is None and logits.min() > -np.inf:
        return None
    alive: Ids = np.flatnonzero(logits != -np.inf) if among is None else among[logits[among] != -np.inf]
    return alive


def summarise(choice: Choice, count: int, spell: Spelling, stage_probs: bool = False) -> Summary:
    """Sum up one choice with its `count` most probable candidates (the chosen token is always among them).

    With `stage_probs` their probabilities after every stage too.
    """
    logits = choice.raw.numpy()
    after = _distributions(choice)
    raw, final = after[0], after[-1]
    top = highest(logits, max(count, 2))
    chosen = choice.token_id
    logit = float(logits[chosen])
    listed = top[:count].tolist()
    ranks = list(range(1, len(listed) + 1))
    if chosen not in listed:
        listed.append(chosen)
        ranks.append(_rank(logits, chosen))
    return Summary(
        rank=ranks[listed.index(chosen)],
        logprob_nats=logit - raw.lse,
        prob=math.exp(logit - raw.lse),
        prob_final=math.exp(float(choice.final[chosen]) - final.lse),
        entropy_nats=raw.entropy_nats,
        margin_logits=float(logits[top[0]] - logits[top[1]]) if len(top) > 1 else math.inf,
        candidates=_candidates(choice, listed, ranks, (raw, final), spell),
        stages=_stages(choice, after, np.array(listed) if stage_probs else None),
        mass_above=_mass_above(choice, final) if choice.drawn else None,
    )


def _rank(logits: Logits, token_id: int) -> int:
    """The place in descending order; of equals the lower id comes first."""
    logit = logits[token_id]
    return 1 + int(np.count_nonzero(logits > logit)) + int(np.count_nonzero(logits[:token_id] == logit))


def highest(logits: Logits, count: int) -> Ids:
    """The ids of the `count` highest logits [V], highest first; of equals the lower id first, as argmax has it."""
    count = min(count, len(logits))
    among = np.flatnonzero(logits >= _low_bar(logits, count))
    top: Ids = among[np.argsort(-logits[among], kind="stable")[:count]]
    return top


def _low_bar(logits: Logits, count: int) -> np.float32:
    """A value that at least `count` logits reach, and not many more.

    Of `_GROUPS` groups the highest ones: a group's highest logit stands for one. A partition of all takes longer.
    """
    if count < _GROUPS <= len(logits) // _GROUPS:
        whole = len(logits) // _GROUPS * _GROUPS
        logits = logits[:whole].reshape(-1, _GROUPS).max(axis=0)  # neighbours may be alike
    bar: np.float32 = np.partition(logits, len(logits) - count)[len(logits) - count]
    return bar


def _distributions(choice: Choice) -> list[Distribution]:
    """The raw distribution, and the one after every stage."""
    found = [Distribution.of(choice.raw.numpy())]
    for stage in choice.stages:
        found.append(Distribution.of(stage.logits.numpy(), found[-1].alive))
    return found


def _stages(choice: Choice, after: list[Distribution], shown: Ids | None) -> tuple[Stage, ...]:
    """What each stage left, with the probabilities of the ids in `shown`."""
    stages, entered = [], choice.raw.numpy()
    for stage, (before, left) in zip(choice.stages, pairwise(after), strict=True):
        fewer = left.alive is not None and left.survivors < before.survivors
        kept = min(float(before.probs(entered[left.alive]).sum(dtype=np.float64)), 1.0) if fewer else 1.0
        entered = stage.logits.numpy()
        probs = () if shown is None else tuple(left.probs(entered[shown]).tolist())
        settings = {stage.name: stage.value}
        stages.append(Stage(stage.name, settings, left.survivors, kept, left.entropy_nats, probs))
    return tuple(stages)


def _mass_above(choice: Choice, final: Distribution) -> float:
    """The final probability of all tokens that are more probable than the chosen one."""
    logits = choice.final.numpy()
    alive = logits if final.alive is None else logits[final.alive]
    above = alive[alive > logits[choice.token_id]]
    return min(float(final.probs(above).sum(dtype=np.float64)), 1.0)


def _candidates(
    choice: Choice, ids: list[int], ranks: list[int], around: tuple[Distribution, Distribution], spell: Spelling
) -> tuple[Candidate, ...]:
    raw, final = around
    index = np.array(ids)
    logits = choice.raw.numpy()[index]
    prob_raw = raw.probs(logits).tolist()
    prob_final = final.probs(choice.final.numpy()[index]).tolist()
    removed = _removed_by(choice, index)
    rows = zip(ranks, ids, logits.tolist(), prob_raw, prob_final, removed, strict=True)
    return tuple(Candidate(rank, i, *spell(i), logit, p, q, gone) for rank, i, logit, p, q, gone in rows)


def _removed_by(choice: Choice, index: Ids) -> list[str | None]:
    """The first stage after which each token is gone; None for the survivors."""
    removed: list[str | None] = [None] * len(index)
    for stage in choice.stages:
        gone = (stage.logits.numpy()[index] == -np.inf).tolist()
        removed = [stage.name if gone[i] and name is None else name for i, name in enumerate(removed)]
    return removed
