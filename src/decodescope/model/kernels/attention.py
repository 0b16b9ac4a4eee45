"""Attention of a few new positions over what the KV cache holds, read once, as it is stored; sums are float32."""

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from decodescope.model.kernels.compiled import Library, library
from decodescope.model.kernels.threads import threads

if TYPE_CHECKING:
    from decodescope.model.cache_formats import Held, Stored

MOST_QUERIES = 8  # new positions; for more, torch's products of matrices are faster
_LANES = 16
# `enum kind` in numbers.h.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
_whole, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Stretch(ctypes.Structure):
    """`stretch` in attention.h."""

    _fields_ = (
        ("keys", _pointer), ("values", _pointer), ("key_scales", _pointer), ("value_scales", _pointer),
        ("rows", _whole), ("length", _whole), ("key_steps", _whole * 3), ("value_steps", _whole * 3),
        ("key_scale_steps", _whole * 2), ("value_scale_steps", _whole * 2), ("made_there", _whole * 4),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    """`attention` in attention.h."""

    _fields_ = (
        ("kind", ctypes.c_int), ("stretches", ctypes.c_int), ("past", ctypes.POINTER(_Stretch)),
        ("sizes", _whole * 5), ("visible", _pointer), ("visible_steps", _whole * 2),
        ("q", _pointer), ("scale", ctypes.c_float), ("out", _pointer),
        ("made_there", _pointer * 2), ("planned_there", _whole * 3),
    )  # fmt: skip


def attends(q: Float[Tensor, "B H T d"], keys: "Held") -> bool:
    """Whether `cached_attention` can be asked here: few queries, heads of whole lanes, compiled kernels."""
    known = keys.dtype in _KINDS and q.shape[3] % _LANES == 0 and q.shape[2] <= MOST_QUERIES
    return known and q.device.type == keys.device.type == "cpu" and library() is not None


def cached_attention(
    q: Float[Tensor, "B H T d"], keys: "Held", values: "Held", visible: Bool[Tensor, "b 1 T S"] | None = None
) -> Float[Tensor, "B H T d"]:
    """softmax(q k^T / sqrt(d)) v in float32, over the positions where `visible` is True (None: all).

    A query that sees nothing finds zeros. What is not visible counts for nothing, but its values must be finite.
    Ask `attends` first. Raises MemoryError where there is no room for what the pieces of work find.
    """
    kernels = library()
    assert kernels is not None
    return _attention(kernels, q, keys, values, visible)


def cached_attention_of_rows(
    q: Float[Tensor, "B H T d"],
    keys: Sequence["Held"],
    values: Sequence["Held"],
    visible: Sequence[Bool[Tensor, "1 1 T S"] | None],
) -> Float[Tensor, "B H T d"]:
    """`cached_attention` where every row has positions of its own (as many as it likes), in one piece of work."""
    kernels = library()
    assert kernels is not None
    q, out = q.float().contiguous(), torch.empty(q.shape)
    rows = enumerate(zip(keys, values, visible, strict=True))
    _run(kernels, [_job(q, out, slice(row, row + 1), *held) for row, held in rows])
    return out


def _attention(kernels: Library, q: Tensor, keys: "Held", values: "Held", visible: Tensor | None) -> Tensor:
    q, out = q.float().contiguous(), torch.empty(q.shape)
    _run(kernels, [_job(q, out, slice(0, len(q)), keys, values, visible)])
    return out


def _run(kernels: Library, jobs: list[_Attention]) -> None:
    if kernels.attention((_Attention * len(jobs))(*jobs), len(jobs), threads()):
        raise MemoryError("no memory for the parts of an attention")


def _job(q: Tensor, out: Tensor, rows: slice, keys: "Held", values: "Held", visible: Tensor | None) -> _Attention:
    """The attention of some rows; the tensors must outlive it."""
    _, H, T, d = q.shape
    pairs = list(zip(keys.stretches, values.stretches, strict=True))
    past = (_Stretch * len(pairs))(*(_stretch(*pair) for pair in pairs))
    mask, steps = (None, (0, 0)) if visible is None else (visible.data_ptr(), _mask_steps(visible))
    sizes = (rows.stop - rows.start, H, keys.stretches[0].numbers.shape[1], T, d)
    first, scale = 4 * rows.start * H * T * d, math.log2(math.e) / math.sqrt(d)
    ends = q.data_ptr() + first, scale, out.data_ptr() + first
    return _Attention(_KINDS[keys.dtype], len(pairs), past, sizes, mask, steps, *ends)


def _stretch(keys: "Stored", values: "Stored") -> _Stretch:
    """Steps in bytes for the numbers, in scales for the scales."""
    k, v, rows, length = keys.numbers, values.numbers, keys.numbers.shape[0], keys.numbers.shape[2]
    scales = () if keys.scales is None or values.scales is None else (keys.scales, values.scales)
    at = [scale.data_ptr() for scale in scales] or [0, 0]  # no address
    steps = _steps(k, k.itemsize), _steps(v, v.itemsize), *(_steps(scale, 1) for scale in scales)
    return _Stretch(k.data_ptr(), v.data_ptr(), *at, rows, length, *steps)


def _steps(tensor: Tensor, width: int) -> tuple[int, ...]:
    """From one to the next along all axes but the last, which lies side by side."""
    *steps, last = tensor.stride()
    assert last == 1 or tensor.shape[-1] == 1
    return tuple([width * step for step in steps])


def _mask_steps(visible: Bool[Tensor, "b 1 T S"]) -> tuple[int, int]:
    rows, _, queries = _steps(visible, 1)
    return (rows if visible.shape[0] > 1 else 0), queries
