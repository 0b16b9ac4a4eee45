"""Reading a GGUF file's header: metadata and tensor table, without trusting a single number in it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
`gguf.GGUFReader` builds a numpy view per string and needs seconds for a 150k vocabulary; one pass of
`struct` over the mapped file needs about a tenth of a second.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodescope.errors import InputError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SHOWN = 80  # characters of a name that a fault repeats

# ggml type id -> (name, values per block, bytes per block), from ggml's type table.
BLOCK_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` with the outermost dimension first, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    block_type: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key, and the tensor table by tensor name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """The family name in the metadata, `qwen2` for instance."""
        return str(self.metadata.get("general.architecture", ""))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value stored under the architecture's own prefix (`qwen2.block_count`)."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Cursor:
    """Reads forward through the mapped file; a read past the end is a truncated file, never more memory."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def _need(self, count: int) -> None:
        if count > self.size - self.at:
            raise InputError("gguf.truncated", path=self.path, at=self.at, need=count, size=self.size)

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        width = struct.calcsize(code)
        self._need(count * width)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += count * width
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        self._need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, in_array: bool = False) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _ARRAY and not in_array:
            return self._array()
        raise InputError("gguf.bad_value_type", path=self.path, kind=kind, at=self.at)

    def _array(self) -> Any:
        (kind,) = self.numbers("I")
        (count,) = self.numbers("Q")
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count)
        self._need(count * 8)  # a string takes at least its length field
        return [self.value(kind, in_array=True) for _ in range(count)]


def is_gguf(path: Path) -> bool:
    """Whether the file carries GGUF's name or magic."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_header(path: Path) -> GGUFHeader:
    """Parse the header of a GGUF file.

    Raises InputError naming file and place for a file that cannot be read or is empty, a wrong magic, an
    unknown version, a truncated file, anything named twice, or tensors that lie outside the file.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise InputError("gguf.magic" if magic else "gguf.empty", path=path)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise InputError("gguf.unreadable", path=path, reason=error.strerror or error) from None


def _parse(cursor: _Cursor) -> GGUFHeader:
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        raise InputError("gguf.version", path=cursor.path, version=version)
    tensor_count, metadata_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise InputError("gguf.duplicate", path=cursor.path, name=key[:_SHOWN])
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    start = cursor.at + -cursor.at % _alignment(cursor.path, metadata)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise InputError("gguf.duplicate", path=cursor.path, name=name[:_SHOWN])
        tensors[name] = _locate(cursor, name, shape, kind, start + offset)
    return GGUFHeader(cursor.path, metadata, tensors)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise InputError("gguf.alignment", path=path, alignment=str(alignment)[:_SHOWN])
    return alignment


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (dimensions,) = cursor.numbers("I")
    if dimensions > _MAX_DIMENSIONS:
        raise InputError("gguf.dimensions", path=cursor.path, name=name[:_SHOWN], dimensions=dimensions)
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    (kind,) = cursor.numbers("I")
    (offset,) = cursor.numbers("Q")
    return name, shape, kind, offset


def _locate(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    if kind not in BLOCK_TYPES:
        raise InputError("gguf.block_type", path=cursor.path, name=name[:_SHOWN], kind=kind)
    block_type, values, width = BLOCK_TYPES[kind]
    count = math.prod(shape)
    if not shape or count == 0 or shape[-1] % values:
        raise InputError(
            "gguf.shape", path=cursor.path, name=name[:_SHOWN], shape=list(shape), block_type=block_type
        )
    size = count // values * width
    if offset + size > cursor.size:
        missing = offset + size - cursor.size
        raise InputError("gguf.tensor_outside", path=cursor.path, name=name[:_SHOWN], missing=missing)
    return TensorInfo(name, shape, block_type, offset, size)
