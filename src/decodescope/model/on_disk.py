"""A matrix that stays in a file and comes into memory when it is needed."""

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from decodescope.errors import ResourceError
from decodescope.model.kernels import Packed


class DiskFile:
    """An open file that any thread may read at any place."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """`path` is for messages: of a file without a name, the folder."""
        self.path = path
        self._file, self._turn = file, threading.Lock()
        weakref.finalize(self, file.close)

    def read_into(self, memory: Tensor, offset: int) -> None:
        """Fill a vector of bytes. Raises ResourceError where the file ends before, or cannot be read."""
        with self._turn:
            try:
                self._file.seek(offset)
                count = self._file.readinto(memory.numpy().data)  # type: ignore[attr-defined]
            except OSError as error:
                raise ResourceError("disk.read", path=self.path, reason=error.strerror) from None
        if count != memory.numel():
            raise ResourceError("disk.read", path=self.path, reason=f"{count} < {memory.numel()}")

    def append(self, content: Tensor) -> int:
        """Write a tensor's bytes at the end, and say where they begin. Raises ResourceError where it cannot."""
        with self._turn:
            try:
                start = self._file.seek(0, os.SEEK_END)
                self._file.write(content.reshape(-1).view(torch.uint8).numpy().data)
                self._file.flush()
            except OSError as error:
                raise ResourceError("disk.write", path=self.path, reason=error.strerror) from None
        return start

    def forget(self) -> None:
        """Ask the system not to keep the file's content in memory any longer; some cannot be asked."""
        if hasattr(os, "posix_fadvise"):
            os.fsync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True, eq=False)
class OnDisk:
    """A matrix [N, K] in a file, byte for byte as it is held in memory: in a dtype, or (None) in blocks."""

    file: DiskFile
    offset: int
    nbytes: int
    shape: tuple[int, int]
    format: str  # block format (Q4_K ...) or dtype (bfloat16 ...)
    dtype: torch.dtype | None

    @property
    def device(self) -> torch.device:
        """Where it is read to."""
        return torch.device("cpu")

    def read(self, memory: Tensor | None = None) -> Tensor | Packed:
        """The matrix, in `memory` (a vector of `nbytes`) or in memory of its own. Raises ResourceError."""
        taken = torch.empty(self.nbytes, dtype=torch.uint8) if memory is None else memory
        self.file.read_into(taken, self.offset)
        if self.dtype is None:
            return Packed(self.format, taken.view(self.shape[0], -1))
        return taken.view(self.dtype).view(self.shape)
