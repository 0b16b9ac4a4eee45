"""What keys and values are held in: any float as it is, or bytes with a scale for every position and head.

Some channels of a key are far larger than the rest, and nearly the same at every position: one scale for all of
them leaves the others few steps. Keys in bytes are therefore held less a centre of their head
(https://arxiv.org/abs/2410.02367): what it adds to all scores of a query alike, the softmax takes away. In int8,
whose steps are all of one size, they are also turned by a Hadamard matrix, which makes every channel as large as
the others (https://arxiv.org/abs/2404.00456); queries are turned for them, and the products are the same.

Mean KL per token of Qwen2.5-Coder-0.5B over 480 tokens, in nats: bfloat16 3.8e-4, float16 2.9e-6; int8 4.3e-4
(as it comes 2.4e-2), float8 3.0e-3 (as it comes 2.6e-2, turned too 1.6e-2).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Num
from torch import Tensor

from decodescope.model.kernels.arena import Arena

FORMATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
TURNED = torch.int8
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # of the formats that have scales
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGE = 4 << 20  # bytes from which on memory comes in huge pages: small ones are read at two thirds of the speed


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Keys or values of positions that follow one another; numbers of one byte mean number * scale."""

    numbers: Num[Tensor, "b K S d"]
    scales: Float[Tensor, "b K S"] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numbers, and their scales where they have some."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    @property
    def nbytes(self) -> int:
        """Of the numbers and their scales."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def first(self, count: int) -> "Stored":
        """The first `count` positions, in the same memory."""
        scales = None if self.scales is None else self.scales[:, :, :count]
        return Stored(self.numbers[:, :, :count], scales)

    def rows(self, rows: list[int]) -> "Stored":
        """A copy of some batch rows, in this order."""
        return Stored(*(tensor[rows] for tensor in self.tensors))

    def write(self, start: int, values: Float[Tensor, "b K T d"]) -> None:
        """Put values at the positions from `start` on, rounded to what the numbers can be.

        A scale is the largest value of a head at a position by the largest number: NaN and infinities make all of
        them NaN.
        """
        here = slice(start, start + values.shape[2])
        if self.scales is None:
            self.numbers[:, :, here] = values
            return
        wide, dtype = values.float(), self.numbers.dtype
        largest = torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True)
        scales = largest.div_(_LARGEST[dtype]).clamp_(min=_SMALLEST_SCALE)
        numbers = wide / scales
        self.numbers[:, :, here] = numbers.round_() if dtype == torch.int8 else numbers
        self.scales[:, :, here] = scales[..., 0]

    def take(self, other: "Stored", count: int) -> None:
        """Copy the first `count` positions of another of the same format."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :, :count] = theirs[:, :, :count]

    def plain(self) -> Float[Tensor, "b K S d"]:
        """The values themselves: the numbers where they have no scales, else in float32."""
        return self.numbers if self.scales is None else self.numbers.float() * self.scales[..., None]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Keys or values [B, K, S, d] of all positions, stretch by stretch; one of a single row is every row's.

    With a `centre` they are keys in bytes, held less this; `turned` ones in int8.
    """

    stretches: tuple[Stored, ...]
    centre: Float[Tensor, "b K 1 d"] | None = None

    @property
    def shape(self) -> torch.Size:
        """B, K, S, d."""
        _, heads, _, size = self.stretches[0].numbers.shape
        rows = max(stretch.numbers.shape[0] for stretch in self.stretches)
        return torch.Size((rows, heads, self.positions, size))

    @property
    def positions(self) -> int:
        """S."""
        return sum(stretch.numbers.shape[2] for stretch in self.stretches)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.stretches[0].numbers.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.stretches[0].numbers.device

    def plain(self) -> Float[Tensor, "B K S d"]:
        """The values in one tensor; without a copy where there is one stretch and no scales."""
        parts = [stretch.plain() for stretch in self.stretches]
        rows, joined = max(part.shape[0] for part in parts), parts[0]
        if len(parts) > 1:
            joined = torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=2)
        return joined if self.centre is None else self._turned(joined) + self.centre

    def facing(self, q: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """The queries for keys as they are held: each has one number in all its products that is not theirs."""
        return q if self.centre is None else self._turned(q)

    def _turned(self, vectors: Tensor) -> Tensor:
        return turned(vectors) if self.dtype == TURNED else vectors

    def float(self) -> Float[Tensor, "B K S d"]:
        """The values in float32."""
        return self.plain().float()


def has_scales(dtype: torch.dtype | None) -> bool:
    """Whether numbers of this dtype mean nothing without scales."""
    return dtype in _LARGEST


def centre_of(keys: Float[Tensor, "b K T d"]) -> Float[Tensor, "b K 1 d"]:
    """What keys at these positions have in common: their mean, of numbers that are any."""
    return keys.float().nan_to_num(0.0, 0.0, 0.0).mean(2, keepdim=True)


def turned(vectors: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Vectors in float32, turned so that each channel is as much of every one; turned twice they are as before.

    By the Hadamard matrix of the largest power of two in d, block by block.
    """
    size = vectors.shape[-1]
    return vectors.float() @ _hadamard(size, size & -size, vectors.device)


@cache
def _hadamard(size: int, block: int, device: torch.device) -> Float[Tensor, "d d"]:
    """Sylvester's, orthogonal and symmetric, along the diagonal."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix)), torch.cat((matrix, -matrix))), dim=1)
    return torch.kron(torch.eye(size // block, device=device), matrix / math.sqrt(block))


def name_of(dtype: torch.dtype) -> str:
    """What a format of FORMATS is called."""
    return next(name for name, each in FORMATS.items() if each == dtype)


def room(like: Float[Tensor, "b K T d"], dtype: torch.dtype | None, positions: int) -> Stored:
    """Uninitialised memory for so many positions of the rows and heads of `like`, in its dtype or another."""
    rows, heads, _, size = like.shape
    numbers = _memory(like, (rows, heads, positions, size), dtype or like.dtype)
    scaled = numbers.dtype in _LARGEST
    return Stored(numbers, like.new_empty((rows, heads, positions), dtype=torch.float32) if scaled else None)


def _memory(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if like.device.type == "cpu" and math.prod(shape) * dtype.itemsize >= _LARGE:
        return Arena(0).take(shape, dtype)
    return like.new_empty(shape, dtype=dtype)


def joined(stretches: Iterable[Stored]) -> Stored:
    """One copy of positions that follow one another."""
    return Stored(*(torch.cat(parts, dim=2) for parts in zip(*(each.tensors for each in stretches), strict=True)))


def total_bytes(stored: Iterable[Stored]) -> int:
    """Bytes of several."""
    return sum(each.nbytes for each in stored)
