"""A weight as GGUF blocks, row by row as they lie in the file."""

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from decodescope.formats.gguf import BLOCK_TYPES

# In the order of `enum format` in blocks.h.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_SIZES = {name: (values, width) for name, values, width in BLOCK_TYPES.values() if name in FORMATS}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """N rows of K weights in blocks; `format` is one of FORMATS. Raises ValueError where the bytes do not fit."""

    format: str
    blocks: UInt8[Tensor, "N bytes_per_row"]

    def __post_init__(self) -> None:
        width = _SIZES[self.format][1] if self.format in _SIZES else 0
        blocks = self.blocks
        whole = width and blocks.dtype == torch.uint8 and blocks.ndim == 2 and blocks.shape[1] % width == 0
        if not whole or not blocks.is_contiguous() or blocks.device.type != "cpu":
            raise ValueError(f"no contiguous rows of {self.format} blocks: {blocks.dtype} {tuple(blocks.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows N and values a row K."""
        values, width = _SIZES[self.format]
        return self.blocks.shape[0], self.blocks.shape[1] // width * values

    @property
    def nbytes(self) -> int:
        """Bytes that a product with one row of activations reads."""
        return self.blocks.numel()


def row_bytes(block_format: str, values: int) -> int | None:
    """Bytes of a row of `values` weights in this format; None where there is no kernel or no whole block."""
    if block_format not in _SIZES or values % _SIZES[block_format][0]:
        return None
    return values // _SIZES[block_format][0] * _SIZES[block_format][1]
