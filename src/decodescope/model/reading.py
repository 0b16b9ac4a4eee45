"""Every tensor of a checkpoint, read ahead side by side, checked, in the precision and memory asked for."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from decodescope.errors import InputError
from decodescope.model.config import ModelConfig
from decodescope.model.kernels import Packed
from decodescope.model.precision import Precision
from decodescope.model.quantize import pack
from decodescope.model.weights import Take, Weights

_FINITE_CHUNK = 1 << 18  # values
_MOST_READERS = 4  # each has temporaries of its own


def read_all(
    weights: Weights, precision: Precision, take_for: Callable[[str], Take]
) -> Iterator[tuple[str, Tensor | Packed]]:
    """Every tensor, embedding and head first; some are read ahead side by side, each by a thread of its own.

    Parallel regions inside the many small operations of unpacking would wait for the scheduler as soon as
    another process is busy; whole tensors side by side do not. What is being read at once never exceeds twice
    the largest tensor, and the largest come before the rest takes its memory. Raises InputError for a tensor with
    NaN or infinite values.
    """
    threads, side_by_side = torch.get_num_threads(), readers()
    shapes = in_order(weights.config)
    room = 2 * max(math.prod(shape) for _, shape in shapes)
    pending: deque[tuple[str, int, Future[Tensor | Packed]]] = deque()
    try:
        with ThreadPoolExecutor(side_by_side, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for name, shape in shapes:
                size = math.prod(shape)
                while len(pending) > side_by_side or (pending and sum(p[1] for p in pending) + size > room):
                    yield _next(pending)
                pending.append((name, size, pool.submit(read_one, weights, name, precision, take_for(name))))
            while pending:
                yield _next(pending)
    finally:
        torch.set_num_threads(threads)


def readers() -> int:
    """How many tensors are read side by side."""
    return min(torch.get_num_threads(), _MOST_READERS)


def in_order(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, those of the layers last."""
    return sorted(config.tensor_shapes(), key=lambda each: ".layers." in each[0])


def read_one(weights: Weights, name: str, precision: Precision, take: Take) -> Tensor | Packed:
    """One tensor in its precision. Raises InputError where values are NaN or infinite."""
    if precision.quantize != "none" and not precision.by_bitsandbytes and len(weights.shapes[name]) == 2:
        found = pack(weights.read(name, None), precision.quantize, name, take)
    else:
        found = weights.read(name, precision.of(weights.shapes[name]), take)
    _refuse_nonfinite(weights, name, found)
    return found


def _next(pending: deque[tuple[str, int, Future[Tensor | Packed]]]) -> tuple[str, Tensor | Packed]:
    name, _, future = pending.popleft()
    return name, future.result()


def _refuse_nonfinite(weights: Weights, name: str, found: Tensor | Packed) -> None:
    if isinstance(found, Packed):
        bad, total = found.nonfinite(), math.prod(found.shape)
    else:
        bad, total = _nonfinite(found), found.numel()
    if bad:
        raise InputError("checkpoint.nonfinite", path=weights.path, name=name, count=bad, total=total)


def _nonfinite(tensor: Tensor) -> int:
    # A sum is finite only if every term is; in pieces, because summing 16 bits in float32 makes a copy.
    pieces = torch.split(tensor.view(-1), _FINITE_CHUNK)
    if all(bool(torch.isfinite(piece.sum(dtype=torch.float32))) for piece in pieces):
        return 0
    return int((~torch.isfinite(tensor)).sum())
