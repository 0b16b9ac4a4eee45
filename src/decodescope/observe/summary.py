"""One choice, summed up: the raw distribution, the candidates, and what each sampler stage left.

Entropy is -sum p ln p in nats; everything is computed from float32 logits with log-sum-exp, never from log(p).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decodescope.sampling.sampler import Choice
from decodescope.trace.records import Candidate, Stage

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
    finite: bool  # no NaN and no infinity among the raw logits


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities behind logits [V]: their log-sum-exp and entropy; removed tokens are -inf."""

    lse: float
    entropy_nats: float
    survivors: int

    @classmethod
    def of(cls, logits: Tensor) -> "Distribution":
        """Measure logits [V], or the survivors among them."""
        lse = torch.logsumexp(logits, -1)
        probs = torch.exp(logits - lse)
        # A removed token is 0 * -inf: it contributes nothing, not NaN.
        mean_logit = torch.dot(probs, torch.nan_to_num(logits, neginf=0.0))
        return cls(float(lse), max(float(lse - mean_logit), 0.0), int((logits > -torch.inf).sum()))


def summarise(choice: Choice, count: int, spell: Spelling) -> Summary:
    """Sum up one choice with its `count` most probable candidates (the chosen token is always among them)."""
    raw = Distribution.of(choice.raw)
    values, ids = torch.topk(choice.raw, min(max(count, 2), choice.raw.numel()))
    margin = float(values[0] - values[1]) if len(values) > 1 else math.inf
    stages, final = _stages(choice, raw)
    chosen = choice.token_id
    logit = float(choice.raw[chosen])
    rank = int((choice.raw > logit).sum()) + 1
    listed = ids[:count].tolist()
    if chosen not in listed:
        listed.append(chosen)
    ranks = [rank if token == chosen else place for place, token in enumerate(listed, start=1)]
    return Summary(
        rank=ranks[listed.index(chosen)],
        logprob_nats=logit - raw.lse,
        prob=math.exp(logit - raw.lse),
        prob_final=float(torch.exp(choice.final[chosen] - final.lse)),
        entropy_nats=raw.entropy_nats,
        margin_logits=margin,
        candidates=_candidates(choice, listed, ranks, (raw, final), spell),
        stages=stages,
        finite=math.isfinite(raw.lse) and math.isfinite(raw.entropy_nats),
    )


def _stages(choice: Choice, raw: Distribution) -> tuple[tuple[Stage, ...], Distribution]:
    """What each stage left, and the distribution after the last of them."""
    stages, before = [], raw
    before_logits = choice.raw
    for stage in choice.stages:
        after = Distribution.of(stage.logits)
        kept = 1.0
        if after.survivors < before.survivors:
            kept = float(torch.exp(before_logits[stage.logits > -torch.inf] - before.lse).sum())
        stages.append(Stage(stage.name, {stage.name: stage.value}, after.survivors, kept, after.entropy_nats))
        before, before_logits = after, stage.logits
    return tuple(stages), before


def _candidates(
    choice: Choice, ids: list[int], ranks: list[int], around: tuple[Distribution, Distribution], spell: Spelling
) -> tuple[Candidate, ...]:
    raw, final = around
    index = torch.tensor(ids)
    logits = choice.raw[index]
    prob_raw = torch.exp(logits - raw.lse).tolist()
    prob_final = torch.exp(choice.final[index] - final.lse).tolist()
    removed = _removed_by(choice, index)
    rows = zip(ranks, ids, logits.tolist(), prob_raw, prob_final, removed, strict=True)
    return tuple(Candidate(rank, i, *spell(i), logit, p, q, gone) for rank, i, logit, p, q, gone in rows)


def _removed_by(choice: Choice, index: Tensor) -> list[str | None]:
    """The first stage after which each token is gone; None for the survivors."""
    removed: list[str | None] = [None] * len(index)
    for stage in choice.stages:
        gone = (stage.logits[index] == -torch.inf).tolist()
        removed = [stage.name if gone[i] and name is None else name for i, name in enumerate(removed)]
    return removed
