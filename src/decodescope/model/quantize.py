"""Matrices put into fewer bits while they are loaded: `--quantize int8`, `int4`, `nf4`.

Embedding and head are Q8_0 in all of them: 4 bits there cost more accuracy than elsewhere, and a 7B's two are a
seventh of its weights. A row that is no whole number of blocks, or has values beyond float16, stays dense.
"""

import torch
from torch import Tensor

from decodescope.model.kernels import Packed, row_bytes, unpack_rows
from decodescope.model.kernels.packing import HALF_LARGEST, pack_into
from decodescope.model.weights import Take

# The first format whose blocks fill a row.
FORMATS = {"int8": ("Q8_0",), "int4": ("Q4_K", "Q4_0"), "nf4": ("NF4",)}
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")
_TILE_VALUES = 1 << 20  # of blocks unpacked to be packed anew


def block_format(kind: str, name: str, columns: int) -> str | None:
    """What the matrix called `name` with rows of `columns` is packed as; None: it stays dense."""
    formats = FORMATS["int8"] if name in _ENDS else FORMATS[kind]
    return next((each for each in formats if row_bytes(each, columns)), None)


def pack(matrix: Tensor | Packed, kind: str, name: str, take: Take) -> Tensor | Packed:
    """The matrix called `name` in fewer bits, in memory from `take`; dense in 16 bits where it cannot be packed.

    Blocks of no more bytes than asked for stay as they are. Values that are not finite, or beyond float16, keep
    their dtype: whoever loads refuses the first and names them.
    """
    rows, columns = matrix.shape
    packed_as = block_format(kind, name, columns)
    size = row_bytes(packed_as, columns) if packed_as else None
    if packed_as and size and matrix.nbytes > rows * size:
        out = Packed(packed_as, take((rows, size), torch.uint8))
        if _fill(out, matrix):
            return out
    if isinstance(matrix, Packed):
        return Packed(matrix.format, _moved(matrix.blocks, take))
    return _moved(_in_16_bits(matrix), take)


def _fill(out: Packed, matrix: Tensor | Packed) -> bool:
    """Pack the matrix into `out`; False where it cannot be. Blocks are unpacked tile by tile."""
    if isinstance(matrix, Tensor):
        return pack_into(out, matrix)
    step = max(1, _TILE_VALUES // matrix.shape[1])
    return all(
        pack_into(
            Packed(out.format, out.blocks[start : start + step]),
            unpack_rows(matrix, start, start + step, torch.float32),
        )
        for start in range(0, matrix.shape[0], step)
    )


def _in_16_bits(matrix: Tensor) -> Tensor:
    """As float16 where the dtype is wider and all values fit."""
    if matrix.element_size() <= 2 or bool(~(matrix.abs() <= HALF_LARGEST).all()):
        return matrix
    return matrix.half()


def _moved(content: Tensor, take: Take) -> Tensor:
    return take(tuple(content.shape), content.dtype).copy_(content)
