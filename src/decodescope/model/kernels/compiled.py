"""The compiled kernels as Python functions: tensors in, tensors out; whoever calls has checked the widths."""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.model.kernels.build import Built, Reason, build
from decodescope.model.kernels.packed import FORMATS, Packed
from decodescope.model.kernels.threads import threads

MOST_ROWS = 16  # of activations: beyond, an unpacked matrix and torch's product are faster, unless there are tiles
MOST_MATRICES = 4  # in one call
_NUMBERS = [ctypes.c_int64 * (3 + 6 * count) for count in range(MOST_MATRICES + 1)]  # `request` in products.c
_FORMATS = {name: number for number, name in enumerate(FORMATS)}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum kind` in products.c


class Library:
    """The loaded library. ctypes lets go of the interpreter during a call; `threads` says how many take part."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.decodescope_instructions.restype = ctypes.c_char_p
        self.instructions: str = library.decodescope_instructions().decode()
        whole, pointer = ctypes.c_int, ctypes.c_void_p
        self._products, self._unpack = library.decodescope_products, library.decodescope_unpack
        self._products.argtypes = [pointer, whole, pointer, pointer, whole]
        self._unpack.restype = None
        self._read = library.decodescope_read
        self._read.restype, self._read.argtypes = ctypes.c_uint64, [pointer, ctypes.c_int64, whole]
        self._unpack.argtypes = [whole, pointer, pointer, pointer, whole, whole]
        self.attention = library.decodescope_attention  # see attention.py
        self.attention.argtypes = [pointer, whole, whole]
        self._pack = library.decodescope_pack
        self._pack.argtypes = [whole, whole, pointer, pointer, pointer, whole]

    def most_rows(self, weights: Sequence[Packed | Tensor]) -> int:
        """Of activations that are better off here than with torch's product on an unpacked matrix."""
        tiled = self.instructions == "AMX" and all(_is_tiled(weight) for weight in weights)
        return sys.maxsize if tiled else MOST_ROWS

    def products(
        self, x: Float[Tensor, "... K"], weights: Sequence[Packed | Tensor], biases: Sequence[Tensor | None]
    ) -> Float[Tensor, "... N"]:
        """x W^T + b of up to MOST_MATRICES weights, side by side: each is read once, all are one piece of work.

        All contiguous on the CPU, x in float32, what is dense in float32, bfloat16 or float16.
        """
        columns, rows = x.shape[-1], sum([weight.shape[0] for weight in weights])
        numbers = [rows, columns, x.numel() // columns if columns else len(x)]
        for weight, bias in zip(weights, biases, strict=True):
            if isinstance(weight, Packed):
                numbers += (1, _FORMATS[weight.format], weight.blocks.data_ptr(), weight.shape[0])
            else:
                numbers += (0, _KINDS[weight.dtype], weight.data_ptr(), weight.shape[0])
            numbers += (0, 0) if bias is None else (bias.data_ptr(), _KINDS[bias.dtype])
        out = torch.empty(*x.shape[:-1], rows)
        wanted = _NUMBERS[len(weights)](*numbers)
        if self._products(wanted, len(weights), x.data_ptr(), out.data_ptr(), threads()):
            raise MemoryError("no memory for the activations' digits")
        return out

    def unpack(self, weight: Packed, start: int, out: Float[Tensor, "rows K"]) -> None:
        """Rows from `start` on into `out`, contiguous, float32 or bfloat16."""
        blocks = weight.blocks[start : start + out.shape[0]].data_ptr()
        size, as_bf16 = (ctypes.c_int64 * 2)(*out.shape), int(out.dtype == torch.bfloat16)
        self._unpack(_FORMATS[weight.format], blocks, out.data_ptr(), size, as_bf16, threads())

    def pack(self, rows: Float[Tensor, "N K"], out: Packed) -> bool:
        """Contiguous rows of float32, bfloat16 or float16 as blocks; False: a value is beyond float16, or NaN."""
        kinds, size = (_FORMATS[out.format], _KINDS[rows.dtype]), (ctypes.c_int64 * 2)(*rows.shape)
        return not self._pack(*kinds, rows.data_ptr(), out.blocks.data_ptr(), size, threads())

    def read(self, memory: Tensor) -> None:
        """Every whole 64-bit word of a contiguous tensor, by as many threads as a product."""
        self._read(memory.data_ptr(), memory.nbytes // 8, threads())


@dataclass(frozen=True, slots=True)
class Report:
    """What products run on (AMX, AVX-512 VNNI, AVX-512, AVX2 or C; None: they are not compiled), and why not."""

    instructions: str | None
    library: Path | None = None
    reason: Reason | None = None
    detail: str = ""


@cache
def _loaded() -> tuple[Library | None, Report]:
    built: Built = build()
    if built.path is None:
        return None, Report(None, reason=built.reason, detail=built.detail)
    try:
        library = Library(built.path)
    except (OSError, AttributeError) as error:
        return None, Report(None, reason="load_failed", detail=str(error)[:400])
    return library, Report(library.instructions, built.path)


def library() -> Library | None:
    """The kernels of this machine, built when first asked for; None where they cannot be had."""
    return _loaded()[0]


def available() -> Report:
    """Whether products are compiled here, with which instructions, and why not."""
    return _loaded()[1]


def _is_tiled(weight: Packed | Tensor) -> bool:
    """NF4's levels are no whole numbers."""
    return isinstance(weight, Packed) and weight.format != "NF4"


def takes(x: Tensor, weight: Packed | Tensor) -> bool:
    """Whether the compiled kernels know this product (apart from the number of rows)."""
    if isinstance(weight, Packed):
        return x.is_cpu and min(weight.shape) > 0
    return x.is_cpu and weight.is_cpu and weight.dtype in _KINDS and weight.is_contiguous() and weight.numel() > 0
