"""Statistics of many tensors at once: moments, extremes, sums and a signature, all in float64.

One by one they would cost more than the forward pass itself: tensors of one size are measured together, on one
thread, so that looking never waits for a thread pool.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Values = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

_AT_ONCE = 2**16  # elements measured together, half a MB in float64; what is larger is cut by rows
_CANCELLED = 1e-6
_GOLDEN = 0.6180339887498949


class Statistics(NamedTuple):
    """What is known of a tensor's elements. `m2` is the sum of squared distances from the mean."""

    size: int
    mean: float
    m2: float
    min: float
    max: float
    sum: float
    signature: float
    zeros: int
    nonfinite: int

    def joined(self, other: "Statistics") -> "Statistics":
        """The statistics of both tensors together (Chan's formula, https://doi.org/10.2307/2683386)."""
        size, total = self.size + other.size, self.sum + other.sum
        apart = other.mean - self.mean
        return Statistics(
            size=size,
            mean=total / size,
            m2=self.m2 + other.m2 + apart * apart * self.size * other.size / size,
            min=float(np.minimum(self.min, other.min)),  # NaN wins
            max=float(np.maximum(self.max, other.max)),
            sum=total,
            signature=self.signature + other.signature,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
        )


def measure(values: Sequence[Float[Tensor, "1 ... T Y"]], start: int) -> Sums:
    """A line of `Statistics` for each of several tensors of one shape and dtype; T is positions from `start` on.

    The signature is the sum of every element times a weight of its index on each axis.
    """
    T, size = values[0].shape[-2], values[0].numel()
    rows = max(_AT_ONCE * T // size, 1)
    if rows < T:
        return np.array([_in_pieces(value, rows, start) for value in values])
    pattern = _pattern(values[0].shape, start).ravel()
    together = max(_AT_ONCE // size, 1)
    batches = (values[first : first + together] for first in range(0, len(values), together))
    return np.concatenate(
        [_group(torch.stack(list(batch)).flatten(1).float().cpu().numpy(), pattern) for batch in batches]
    )


def measure_seen(value: Float[Tensor, "1 H T S"], seen: Bool[Tensor, "1 1 T S"], start: int) -> Statistics:
    """The statistics of scores or patterns, without the columns that a row may not look at."""
    visible = seen.cpu().expand(value.shape).numpy()
    plain = value.float().cpu().numpy()[visible]
    return Statistics(*_group(plain[None], _pattern(value.shape, start)[visible])[0].tolist())


def _pattern(shape: Sequence[int], start: int) -> Sums:
    """The weights of a signature for every element [1, ..., T, Y]: products of a number for each index."""
    *others, T, last = shape
    inner = _inner((*others[1:], last))
    return (inner[..., None, :] * _weights(start, T)[:, None])[None]


@lru_cache(maxsize=16)
def _inner(shape: tuple[int, ...]) -> Sums:
    """The part that is the same for every position."""
    product = np.ones(())
    for size in shape:
        product = product[..., None] * _weights(0, size)
    return product


@lru_cache(maxsize=64)
def _weights(first: int, count: int) -> Sums:
    """Numbers in [-1, 1), fixed by their index and never repeated: a signature sees a change of order."""
    weights: Sums = np.modf((np.arange(first, first + count) + 1.0) * _GOLDEN)[0] * 2 - 1
    return weights


def _in_pieces(value: Float[Tensor, "1 ... T Y"], rows: int, start: int) -> Statistics:
    parts = enumerate(torch.split(value, rows, dim=-2))
    return reduce(
        Statistics.joined, (Statistics(*measure([part], start + i * rows)[0].tolist()) for i, part in parts)
    )


@np.errstate(invalid="ignore", over="ignore")
def _group(values: Values, pattern: Sums) -> Sums:
    """The statistics of each row of `values` [n, count], a line each."""
    count = values.shape[1]
    wide = values.astype(np.float64)
    sums = wide.sum(1)
    signatures = np.einsum("ij,j->i", wide, pattern)  # einsum stays on this thread, BLAS would not
    means = sums / count
    squares = np.einsum("ij,ij->i", wide, wide)
    m2 = squares - sums * means
    for row in np.flatnonzero(m2 < squares * _CANCELLED):  # nearly constant: few digits are left of the difference
        wide[row] -= means[row]
        m2[row] = wide[row] @ wide[row]
    zero = values == 0
    zeros = zero.sum(1) if zero.any() else np.zeros(len(values), int)
    broken = np.zeros(len(values), int)
    for row in np.flatnonzero(~np.isfinite(sums)):  # a sum of finite float32 is finite in float64
        broken[row] = count - int(np.isfinite(values[row]).sum())
    sizes = np.full(len(values), count)
    columns = (sizes, means, m2, values.min(1), values.max(1), sums, signatures, zeros, broken)
    return np.stack(columns, axis=1, dtype=np.float64, casting="unsafe")
