"""One choice, summed up: the raw distribution, the candidates, and what each sampler stage left.

Entropy is -sum p ln p in nats; everything is computed from float32 logits with log-sum-exp, never from log(p).
numpy does the passes over the vocabulary: on one thread, so that watching never waits for a thread pool.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from decodescope.sampling.sampler import Choice
from decodescope.trace.records import Candidate, Stage

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_FAR_BELOW = np.float32(-1e4)  # nothing is left of exp() here, and 0 times this is 0, not NaN

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
        peak = float(values.max())
        with np.errstate(over="ignore"):
            below = np.maximum(values - np.float32(peak), _FAR_BELOW)
        weights = np.exp(below)
        total = float(weights.sum(dtype=np.float64))
        below *= weights
        mean_below = float(below.sum(dtype=np.float64)) / total
        entropy = max(math.log(total) - mean_below, 0.0)
        return cls(math.log(total) + peak, entropy, len(values), alive)

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


def summarise(choice: Choice, count: int, spell: Spelling) -> Summary:
    """Sum up one choice with its `count` most probable candidates (the chosen token is always among them)."""
    logits = choice.raw.numpy()
    raw = Distribution.of(logits)
    top = highest(logits, max(count, 2))
    stages, final = _stages(choice, raw)
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
        stages=stages,
    )


def _rank(logits: Logits, token_id: int) -> int:
    """The place in descending order; of equals the lower id comes first."""
    logit = logits[token_id]
    return 1 + int(np.count_nonzero(logits > logit)) + int(np.count_nonzero(logits[:token_id] == logit))


def highest(logits: Logits, count: int) -> Ids:
    """The ids of the `count` highest logits [V], highest first; of equals the lower id first, as argmax has it."""
    count = min(count, len(logits))
    least = torch.topk(torch.from_numpy(logits), count, sorted=False).values.min().item()
    among = np.flatnonzero(logits >= least)  # more than `count` where the last of them have equals
    top: Ids = among[np.argsort(-logits[among], kind="stable")[:count]]
    return top


def _stages(choice: Choice, raw: Distribution) -> tuple[tuple[Stage, ...], Distribution]:
    """What each stage left, and the distribution after the last of them."""
    stages, before, entered = [], raw, choice.raw.numpy()
    for stage in choice.stages:
        left = stage.logits.numpy()
        after = Distribution.of(left, before.alive)
        fewer = after.alive is not None and after.survivors < before.survivors
        kept = min(float(before.probs(entered[after.alive]).sum(dtype=np.float64)), 1.0) if fewer else 1.0
        stages.append(Stage(stage.name, {stage.name: stage.value}, after.survivors, kept, after.entropy_nats))
        before, entered = after, left
    return tuple(stages), before


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
