"""Rows of numbers into blocks: Q8_0, Q4_0, Q4_K, NF4; by the compiled kernel, or with torch to the same bits.

Q8_0 and NF4 take their scale from the largest magnitude, as the gguf package and bitsandbytes do. Q4_0 and Q4_K
try 16 spacings of their levels; scale (and minimum) are the least squares fit to what each rounds to. Bits a
weight, and the error as a share of the norm: Gaussian, Student's t of 5 degrees, down projections of the starter.

    Q8_0    8.50    0.54 %    0.68 %    0.56 %
    Q4_K    4.50    7.1 %     8.3 %     7.5 %    by the extremes alone 7.8, 9.0, 8.2
    Q4_0    4.50    8.1 %    10.3 %     8.9 %    by the largest magnitude alone 8.6, 10.8, 9.5
    Q4_1    5.00    7.0 %     8.1 %     7.3 %    searched alike; not offered
    NF4     4.25    9.2 %    10.5 %     9.6 %

A bit more halves the error of any good format: per byte Q4_K is the best of these, before Q4_0, which fills rows
of 32 values, and Q4_1.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from decodescope.model.gguf_blocks import BLOCK_SIZES, NF4_LEVELS
from decodescope.model.kernels.compiled import library
from decodescope.model.kernels.packed import Packed

HALF_LARGEST = 65504.0  # in float16, which all scales are
_TINY = 2.0**-100  # a block with nothing larger is zero
_CHUNK_VALUES = 1 << 15  # of a chunk: in the cache, and too few for torch to share out among threads
_COMPILED = (torch.float32, torch.bfloat16, torch.float16)

Values = Float[Tensor, "... values"]
Number = Float[Tensor, "n 1"]
Tries = Float[Tensor, "n 16"]


def pack_into(out: Packed, rows: Float[Tensor, "N K"]) -> bool:
    """Fill `out` with these rows; False where a value is not finite or beyond float16, and then `out` is nothing.

    Raises ValueError where the shapes differ, KeyError for formats that can only be read.
    """
    if tuple(rows.shape) != out.shape:
        raise ValueError(f"rows of {tuple(rows.shape)} into {out.shape}")
    pack = _PACK[out.format]
    kernels = library() if rows.dtype in _COMPILED and rows.device.type == "cpu" and rows.numel() else None
    if kernels:
        return kernels.pack(rows.contiguous(), out)
    values, width = BLOCK_SIZES[out.format]
    step = max(1, _CHUNK_VALUES // values)
    chunks = torch.split(rows.reshape(-1, values), step), torch.split(out.blocks.view(-1, width), step)
    for stored, into in zip(*chunks, strict=True):
        chunk = stored.float()
        if not bool((chunk.abs() <= HALF_LARGEST).all()):  # NaN is not either
            return False
        into.copy_(pack(chunk))
    return True


def _sum(a: Values) -> Number:
    """In the one order that has the same bits everywhere: halves onto halves."""
    half = a.shape[-1] // 2
    while half:
        a = a[..., :half] + a[..., half : 2 * half]
        half //= 2
    return a


def _inverse(a: Tensor) -> Tensor:
    return torch.where(a.abs() > _TINY, a.reciprocal(), 0)


def _levels(x: Tensor, offset: Tensor | int, spacing: Tensor, least: int, most: int) -> Tensor:
    """The level of each value: (value - offset) * spacing to nearest, ties to even."""
    return ((x - offset) * spacing).clamp(least, most).round()


def _bytes_of(scales: Tensor) -> UInt8[Tensor, "n bytes"]:
    """Numbers as float16, byte by byte."""
    return scales.half().view(torch.uint8)


def _nibbles(levels: Float[Tensor, "... values"]) -> UInt8[Tensor, "... bytes"]:
    """The first half of each run into the low nibbles, the second into the high ones."""
    low, high = levels.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    at = x * _inverse(scale)
    nearest = ((at.abs() * 2).floor() + 1).div(2).floor() * at.sign()  # ties away from zero
    return torch.cat((_bytes_of(scale), nearest.to(torch.int8).view(torch.uint8)), dim=1)


def _q4_0(x: Tensor) -> Tensor:
    outermost = x.gather(1, x.abs().argmax(1, keepdim=True))
    _, qq, xq = _try_spacings(x, torch.zeros_like(outermost), _inverse(outermost) * _quarters_from(-10), -8, 7)
    fitted = (xq / qq).half().float()
    gain = fitted * (2 * xq - fitted * qq)  # what the sum of squared errors falls by
    best = gain.nan_to_num(0).argmax(1, keepdim=True)
    scale = torch.where(gain.gather(1, best) > 0, fitted.gather(1, best), 0)
    return torch.cat((_bytes_of(scale), _nibbles(_levels(x, 0, _inverse(scale), -8, 7) + 8)), dim=1)


def _q4_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 32)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True)
    one, one_error = _with_fits(groups, (high - low) / 15, -low)
    other, other_error = _with_fits(groups, *_best_line(groups, low, high))
    return torch.where(one_error < other_error, one, other)


def _try_spacings(
    x: Float[Tensor, "n 32"], offset: Number, spacing: Tries, least: int, most: int
) -> tuple[Tries, Tries, Tries]:
    """For 16 spacings of the levels: sums of the levels, of their squares, and of values times levels."""
    levels, squares, products = (torch.zeros_like(spacing) for _ in range(3))
    for i in range(32):
        value = x[:, i : i + 1]
        q = _levels(value, offset, spacing, least, most)
        levels, squares, products = levels + q, squares + q * q, products + q * value
    return levels, squares, products


def _quarters_from(first: int) -> Tensor:
    return first + torch.arange(16) / 4


def _best_line(x: Float[Tensor, "n 32"], low: Number, high: Number) -> tuple[Number, Number]:
    """Scale and minimum (not negative) with the least error: least squares lines through levels of 16 spacings."""
    spacing, x_sum = _inverse(high - low), torch.zeros_like(low)
    for i in range(32):
        x_sum = x_sum + x[:, i : i + 1]
    q, qq, xq = _try_spacings(x, low, spacing * _quarters_from(14), 0, 15)
    spread, down = 32 * qq - q * q, q * xq - qq * x_sum
    lowered = (spread > 0) & (down > 0)
    scale = torch.where(lowered, (32 * xq - x_sum * q) / spread, xq / qq)
    minimum = torch.where(lowered, down / spread, 0)
    error = scale * (scale * qq - 2 * xq - 2 * minimum * q) + minimum * (32 * minimum + 2 * x_sum)
    best = error.nan_to_num(torch.inf).argmin(1, keepdim=True)
    scale, minimum, flat = scale.gather(1, best), minimum.gather(1, best), spacing == 0
    return torch.where(flat, (high - low) / 15, scale), torch.where(flat, -low, minimum)


def _six_bits(values: Float[Tensor, "n 8"]) -> tuple[Number, Float[Tensor, "n 8"]]:
    """A float16 unit for each block, and its eight numbers as 0..63 of that."""
    unit = (values.amax(1, keepdim=True) / 63).half().float()
    return unit, (values * _inverse(unit)).clamp(0, 63).round()


def _with_fits(groups: Float[Tensor, "m 32"], scale: Number, minimum: Number) -> tuple[Tensor, Number]:
    """The blocks of eight groups each for these fits, and each block's sum of squared errors."""
    (d, scales), (least, minima) = _six_bits(scale.view(-1, 8)), _six_bits(minimum.view(-1, 8))
    scale, minimum = (d * scales).view(-1, 1), (least * minima).view(-1, 1)
    q = _levels(groups, -minimum, _inverse(scale), 0, 15)
    off = q * scale - minimum - groups
    errors, total = _sum(off * off).view(-1, 8), torch.zeros_like(d)
    for group in range(8):
        total = total + errors[:, group : group + 1]
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    low = torch.cat((s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6), dim=1)
    high, quants = (s[:, 4:] & 15) | m[:, 4:] << 4, _nibbles(q.view(-1, 64)).view(-1, 128)
    return torch.cat((_bytes_of(d), _bytes_of(least), low, high, quants), dim=1), total


def _nf4(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True)
    midpoints = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / 2
    levels = torch.bucketize((x * _inverse(scale)).clamp(-1, 1), midpoints)
    return torch.cat((_bytes_of(scale), _nibbles(levels)), dim=1)


_PACK: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "NF4": _nf4}
