"""y = x W^T in float32, W read as it is stored: 16-bit numbers or GGUF blocks.

The compiled kernels read each weight once, for few rows of activations at about the speed of memory. For more rows
than they are good for (without AMX), or on a machine without a compiler, the weight is unpacked tile by tile for
torch's matrix product. The weights are exact and activations and sums float32 in both.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from decodescope.model.gguf_blocks import unpack_into
from decodescope.model.kernels.compiled import MOST_MATRICES, library, takes
from decodescope.model.kernels.packed import Packed

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_TILE_VALUES = 1 << 21  # of an unpacked tile: 8 MiB in float32


def product(x: Float[Tensor, "... K"], weight: Packed | Float[Tensor, "N K"]) -> Float[Tensor, "... N"]:
    """x W^T as float32 for activations of any floating dtype. Raises ValueError where K differs."""
    _check_widths(x, (weight,))
    flat = x.float().contiguous()
    kernels = library() if takes(flat, weight) else None
    if kernels is None or x.numel() > kernels.most_rows((weight,)) * x.shape[-1]:
        return _by_tiles(flat, weight)
    return kernels.products(flat, (weight,), (None,))


def products(
    x: Float[Tensor, "... K"], weights: Sequence[object], biases: Sequence[Tensor | None]
) -> Sequence[Float[Tensor, "... N"]] | None:
    """x W^T + b in float32 of weights that our kernels read better than torch does; None where one is not such.

    That is blocks, or 16-bit numbers against few rows of activations. Raises ValueError where K differs.
    """
    if not (x.numel() and x.is_cpu and len(weights) <= MOST_MATRICES):
        return None
    known = [weight for weight in weights if reads(weight)]
    kernels = library() if len(known) == len(weights) else None
    if kernels is None or x.numel() > kernels.most_rows(known) * x.shape[-1]:
        return None
    _check_widths(x, known)
    out = kernels.products(x.float().contiguous(), known, biases)
    return (out,) if len(known) == 1 else torch.split(out, [weight.shape[0] for weight in known], dim=-1)


def _check_widths(x: Tensor, weights: Sequence[Packed | Tensor]) -> None:
    """The kernels would read past the end."""
    for weight in weights:
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(f"{x.shape[-1]} activations against rows of {weight.shape[1]} weights")


def reads(weight: object) -> TypeGuard[Packed | Tensor]:
    """Whether our kernels, where there are some, read this better than torch: blocks or numbers of 16 bits."""
    if isinstance(weight, Packed):
        return True
    return (
        isinstance(weight, Tensor) and weight.dtype in _SIXTEEN_BITS and weight.is_cpu and weight.is_contiguous()
    )


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


def _by_tiles(x: Float[Tensor, "... K"], weight: Packed | Tensor) -> Float[Tensor, "... N"]:
    rows, columns = weight.shape
    out = x.new_empty(*x.shape[:-1], rows)
    step = max(1, _TILE_VALUES // max(1, columns))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if isinstance(weight, Packed):
            tile = unpack_rows(weight, start, stop, torch.float32)
        else:
            tile = weight[start:stop].float()
        out[..., start:stop] = functional.linear(x, tile)
    return out
