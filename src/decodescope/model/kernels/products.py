"""y = x W^T in float32, W read as it is stored: 16-bit numbers or GGUF blocks.

Up to MOST_ROWS rows of activations the compiled kernels read each weight once, at about the speed of memory. For
more rows, or on a machine without a compiler, the weight is unpacked tile by tile for torch's matrix product. The
weights are exact and activations and sums float32 in both.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from decodescope.model.gguf_blocks import unpack_into
from decodescope.model.kernels.compiled import MOST_ROWS, library, takes
from decodescope.model.kernels.packed import Packed

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_TILE_VALUES = 1 << 21  # of an unpacked tile: 8 MiB in float32


def product(x: Float[Tensor, "... K"], weight: Packed | Float[Tensor, "N K"]) -> Float[Tensor, "... N"]:
    """x W^T as float32 for activations of any floating dtype. Raises ValueError where K differs."""
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(f"{x.shape[-1]} activations against rows of {columns} weights")
    flat = (x if x.ndim == 2 else x.reshape(-1, columns)).float().contiguous()
    kernels = library() if flat.shape[0] <= MOST_ROWS and takes(flat, weight) else None
    out = kernels.product(flat, weight) if kernels else _by_tiles(flat, weight)
    return out.view(*x.shape[:-1], rows)


def reads_well(x: Float[Tensor, "... K"], weight: Float[Tensor, "N K"]) -> bool:
    """Whether our kernels beat torch's product for these activations: few rows against 16-bit numbers."""
    few = x.numel() <= MOST_ROWS * weight.shape[1]
    return few and weight.dtype in _SIXTEEN_BITS and takes(x, weight) and library() is not None


def unpack_rows(weight: Packed, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "rows K"]:
    """The values of rows start..stop as `dtype`."""
    stop = min(stop, weight.shape[0])
    kernels = library() if dtype in (torch.float32, torch.bfloat16) else None
    out = torch.empty(stop - start, weight.shape[1], dtype=dtype)
    if kernels:
        kernels.unpack(weight, start, out)
    else:
        unpack_into(out, weight.blocks[start:stop].view(-1), weight.format)
    return out


def read_all(memory: Tensor) -> None:
    """Read a contiguous tensor on the CPU once, the way products read weights: what the memory gives at best."""
    kernels = library()
    if kernels:
        kernels.read(memory)
    else:
        memory.view(torch.uint8).sum()


def _by_tiles(x: Float[Tensor, "M K"], weight: Packed | Tensor) -> Float[Tensor, "M N"]:
    rows, columns = weight.shape
    out = x.new_empty(x.shape[0], rows)
    step = max(1, _TILE_VALUES // max(1, columns))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if isinstance(weight, Packed):
            tile = unpack_rows(weight, start, stop, torch.float32)
        else:
            tile = weight[start:stop].float()
        out[:, start:stop] = functional.linear(x, tile)
    return out
