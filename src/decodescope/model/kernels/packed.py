"""A weight as blocks, row by row as they lie in a GGUF file; NF4 is no type of GGUF's."""

from dataclasses import dataclass, field

import torch
from jaxtyping import UInt8
from torch import Tensor

from decodescope.model.gguf_blocks import BLOCK_SIZES

# In the order of `enum format` in blocks.h.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "NF4")
# Where the float16 of a block lie: quants are whole numbers, so that nothing else can be NaN or infinite.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "NF4": (0,),
}  # fmt: skip
_SIZES = {name: BLOCK_SIZES[name] for name in FORMATS}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """N rows of K weights in blocks; `format` is one of FORMATS. Raises ValueError where the bytes do not fit."""

    format: str
    blocks: UInt8[Tensor, "N bytes_per_row"]
    shape: tuple[int, int] = field(init=False)  # rows N and values a row K; asked for in every product

    def __post_init__(self) -> None:
        values, width = _SIZES.get(self.format, (0, 0))
        blocks = self.blocks
        whole = width and blocks.dtype == torch.uint8 and blocks.ndim == 2 and blocks.shape[1] % width == 0
        if not whole or not blocks.is_contiguous() or blocks.device.type != "cpu":
            raise ValueError(f"no contiguous rows of {self.format} blocks: {blocks.dtype} {tuple(blocks.shape)}")

        object.__setattr__(self, "shape", (blocks.shape[0], blocks.shape[1] // width * values))

    @property
    def device(self) -> torch.device:
        """Main memory, always."""
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes that a product with one row of activations reads."""
        return self.blocks.numel()

    def equals(self, other: "Packed") -> bool:
        """Whether both are the same blocks."""
        return self.format == other.format and torch.equal(self.blocks, other.blocks)

    def nonfinite(self) -> int:
        """How many values are NaN or infinite: all those of a block with such a scale or minimum."""
        values, width = _SIZES[self.format]
        blocks, at = self.blocks.view(-1, width), _HALVES[self.format]
        halves = torch.stack([blocks[:, i : i + 2] for i in at], dim=1).view(torch.float16)  # blocks fields 1
        return values * int((~torch.isfinite(halves)).any(dim=1).sum())


def row_bytes(block_format: str, values: int) -> int | None:
    """Bytes of a row of `values` weights in this format; None where there is no kernel or no whole block."""
    if block_format not in _SIZES or values % _SIZES[block_format][0]:
        return None
    return values // _SIZES[block_format][0] * _SIZES[block_format][1]
