"""The sampler's filters: pure functions from logits [V] (float32) to new logits [V]; -inf means removed.

Each is equal to transformers' processor of that name, ties included; presence and frequency penalty follow
OpenAI's definition. A filter that leaves the logits alone may return them uncopied.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

REMOVED = -float("inf")


def repetition_penalty(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of every token seen, prompt included (arXiv 1909.05858)."""
    seen = torch.tensor(sorted(set(ids)), dtype=torch.long)
    scores = logits[seen]
    return logits.index_put((seen,), torch.where(scores < 0, scores * penalty, scores / penalty))


def presence_penalty(logits: Tensor, generated: Sequence[int], penalty: float) -> Tensor:
    """Subtract `penalty` once from every token generated so far."""
    return _subtract(logits, dict.fromkeys(generated, penalty))


def frequency_penalty(logits: Tensor, generated: Sequence[int], penalty: float) -> Tensor:
    """Subtract `penalty` for each time a token was generated."""
    return _subtract(logits, {token: penalty * count for token, count in Counter(generated).items()})


def _subtract(logits: Tensor, amounts: dict[int, float]) -> Tensor:
    if not amounts:
        return logits
    ids = torch.tensor(list(amounts), dtype=torch.long)
    return logits.index_put((ids,), logits[ids] - torch.tensor(list(amounts.values()), dtype=logits.dtype))


def no_repeat_ngram(logits: Tensor, ids: Sequence[int], size: int) -> Tensor:
    """Remove every token that would complete an n-gram of `size` already in `ids`."""
    if len(ids) + 1 < size:
        return logits
    tail = list(ids[len(ids) + 1 - size :]) if size > 1 else []
    starts = range(len(ids) - size + 1)
    banned = {ids[i + size - 1] for i in starts if list(ids[i : i + size - 1]) == tail}
    return logits.index_fill(0, torch.tensor(sorted(banned), dtype=torch.long), REMOVED) if banned else logits


def temperature(logits: Tensor, value: float) -> Tensor:
    """Divide by the temperature: below 1 sharper, above 1 flatter."""
    return logits / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits, and all that equal the lowest of them."""
    kept = torch.topk(logits, min(k, logits.numel())).values
    return logits.masked_fill(logits < kept[-1], REMOVED)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p (arXiv 1904.09751)."""
    alive = torch.nonzero(logits > REMOVED)[:, 0]
    values = logits[alive]
    low = _improbable(values, p)
    if len(alive) and bool((values[low] == values[~low].amin()).any()):
        # Equals on both sides of the border: one sort over all settles which stay, as in transformers.
        return logits.masked_fill(_improbable(logits, p), REMOVED)
    return logits.index_fill(0, alive[low], REMOVED)


def _improbable(logits: Tensor, p: float) -> Tensor:
    """True where a token and all less probable ones together have at most 1 - p."""
    ascending, order = torch.sort(logits)
    low = ascending.softmax(-1).cumsum(-1) <= 1 - p
    low[-1:] = False
    return torch.empty_like(low).scatter_(0, order, low)


def min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep tokens at least `fraction` times as probable as the most probable one."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < fraction * probs.max(), REMOVED)
