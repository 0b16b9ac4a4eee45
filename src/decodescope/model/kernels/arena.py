"""Room for weights in huge pages: reading half a gigabyte through 4 KiB pages is a third slower.

Linux gives huge pages to memory that asks for them (`madvise`); elsewhere this is plain memory.
"""

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 << 20
_KEPT = 31 << 20  # bytes; glibc learns no more than 32 MiB
_LINE = 64  # bytes: tensors start at a cache line


class Arena:
    """Hands out tensors from large pieces of memory; a piece is free again when its last tensor is gone."""

    def __init__(self, piece_bytes: int = 64 << 20) -> None:
        self._piece_bytes = piece_bytes
        self._turn = threading.Lock()  # several readers take at once
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Raises MemoryError where the system has no more."""
        size = math.prod(shape) * dtype.itemsize
        with self._turn:
            if size > self._free.numel():
                self._free = _huge_pages(max(self._piece_bytes, size))
            taken, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return taken.view(dtype).view(shape)


def _huge_pages(size: int) -> Tensor:
    """At least `size` bytes, from the start of a huge page on; plain memory on other systems."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :]


def keep_freed_blocks() -> None:
    """Make the C library keep freed blocks of up to 31 MiB for the next tensor instead of handing them back.

    A long prompt has a dozen such tensors in every layer, and new memory costs a page fault every 4 KiB: up to a
    quarter of its time. glibc learns from the largest block freed so far (`M_MMAP_THRESHOLD` in mallopt(3)).
    """
    torch.empty(_KEPT, dtype=torch.uint8)
