"""The sampler's filters: pure functions from logits [V] (float32, CPU) to new logits [V]; -inf means removed.

Each is equal to transformers' processor of that name, ties included; presence and frequency penalty follow
OpenAI's definition. A filter that leaves the logits alone may return them uncopied. numpy does the passes over the
vocabulary, on one thread: a parallel region of torch costs more than the pass as soon as the machine is busy.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REMOVED = -float("inf")
_may_overflow = np.errstate(over="ignore", divide="ignore", invalid="ignore")  # the sampler looks at what is left


@_may_overflow
def repetition_penalty(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of every token in `ids` (arXiv 1909.05858)."""
    seen, factor = np.array(list(set(ids)), np.int64), np.float32(penalty)
    scores = logits.numpy()[seen]
    return _with(logits, seen, np.where(scores < 0, scores * factor, scores / factor))


def presence_penalty(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Subtract `penalty` once from every token in `ids`."""
    return _subtract(logits, dict.fromkeys(ids, penalty))


def frequency_penalty(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Subtract `penalty` for each time a token is in `ids`."""
    return _subtract(logits, {token: penalty * count for token, count in Counter(ids).items()})


def _subtract(logits: Tensor, amounts: dict[int, float]) -> Tensor:
    ids, less = np.array(list(amounts), np.int64), np.array(list(amounts.values()), np.float32)
    return _with(logits, ids, logits.numpy()[ids] - less)


def _with(logits: Tensor, ids: NDArray[np.int64], values: NDArray[np.float32] | float) -> Tensor:
    """The logits with other values at some ids."""
    changed = logits.numpy().copy()
    changed[ids] = values
    return torch.from_numpy(changed)


def no_repeat_ngram(logits: Tensor, ids: Sequence[int], size: int) -> Tensor:
    """Remove every token that would complete an n-gram of `size` already in `ids`."""
    if len(ids) < size:
        return logits
    grams = np.lib.stride_tricks.sliding_window_view(np.array(ids), size)
    tail = ids[len(ids) + 1 - size :]
    banned = grams[(grams[:, :-1] == tail).all(axis=1), -1]
    return _with(logits, banned, REMOVED)


@_may_overflow
def temperature(logits: Tensor, value: float) -> Tensor:
    """Divide by the temperature: below 1 sharper, above 1 flatter."""
    return torch.from_numpy(logits.numpy() / np.float32(value))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits, and all that equal the lowest of them."""
    place = max(logits.numel() - k, 0)
    return _keep(logits, logits.numpy() >= np.partition(logits.numpy(), place)[place])


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p (arXiv 1904.09751)."""
    ascending = np.sort(logits.numpy())
    # A token goes when it and all less probable ones together have at most 1 - p.
    low = torch.from_numpy(ascending).softmax(-1).cumsum(-1).numpy() <= np.float32(1 - p)
    removed = int(np.count_nonzero(low[:-1]))
    if removed == 0:
        return logits
    if ascending[removed - 1] == ascending[removed]:
        # Equals on both sides of the border: torch's own order settles which stay, as in transformers.
        return _with(logits, torch.sort(logits).indices[:removed].numpy(), REMOVED)
    return _keep(logits, logits.numpy() >= ascending[removed])


def min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep tokens at least `fraction` times as probable as the most probable one."""
    probs = logits.softmax(-1).numpy()
    return _keep(logits, probs >= fraction * probs.max())


def _keep(logits: Tensor, kept: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(np.where(kept, logits.numpy(), np.float32(REMOVED)))
