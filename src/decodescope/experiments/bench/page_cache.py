"""Making a file cold: dropping it from the system's page cache, and looking whether it went."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_MOST_LEFT = 0.01  # of a file's pages


def make_cold(files: Sequence[Path]) -> bool:
    """Drop files from the page cache; whether they are gone. Only Linux has both calls; pages that another
    process maps, or that are not written yet, stay."""
    try:
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return all(_cached_share(file) <= _MOST_LEFT for file in files)
    except (OSError, AttributeError, ValueError):
        return False


def _cached_share(file: Path) -> float:
    """How much of a file lies in the page cache, by mincore(2)."""
    size = file.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        first = ctypes.c_char.from_buffer(mapped)
        refused = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), found)
        del first  # or the map could not be closed
    if refused:
        raise OSError("mincore")
    return sum(each & 1 for each in found) / pages
