"""The weights of a model on disk, one tensor at a time: safetensors files or one GGUF file."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader, TensorInfo, is_gguf, read_header
from decodescope.formats.safetensors import tensor_offsets
from decodescope.model.config import ModelConfig, read_config
from decodescope.model.gguf_blocks import unpack_into
from decodescope.model.gguf_config import checkpoint_name, config_from_gguf
from decodescope.model.kernels import Packed, row_bytes

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Take = Callable[[tuple[int, ...], torch.dtype], Tensor]  # memory for a tensor of this shape and dtype


class Weights(Protocol):
    """A checkpoint that can be read tensor by tensor."""

    path: Path
    config: ModelConfig
    stored_dtype: torch.dtype  # what the file was made for; packed blocks count as float32
    formats: dict[str, str]  # tensor name -> how it is stored (BF16, Q4_K ...)
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, dtype: torch.dtype | None, take: Take | None = None) -> Tensor | Packed:
        """One tensor on the CPU as `dtype`, or (None) as stored: packed where there are products for its blocks.

        It lies in memory from `take`, or (None) wherever it comes to lie, mapped from the file if need be.
        """
        ...

    def whereabouts(self, name: str, held: Tensor | Packed) -> tuple[Path, int] | None:
        """The file and the offset at which the bytes of `held`, read here, lie as they are; None: nowhere."""
        ...

    def stored_bytes(self) -> dict[str, int]:
        """Bytes on disk by storage format (BF16, Q4_K ...)."""
        ...


def open_weights(path: Path) -> Weights:
    """Open a folder in Hugging Face layout or a GGUF file; reads headers only.

    Raises InputError naming file and fault for anything that cannot be such a checkpoint.
    """
    if path.is_dir():
        return SafetensorsWeights(path)
    if path.is_file() and is_gguf(path):
        return GGUFWeights(path)
    raise InputError("checkpoint.unknown_file", path=path)


class SafetensorsWeights:
    """A folder: config.json and *.safetensors. The library checks every offset against the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path / "config.json")
        self.formats: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for file in _shards(path):
            self._index(file)
        embedding = self.formats.get("model.embed_tokens.weight", "F32")
        self.stored_dtype = FLOATS[embedding]

    def _index(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    if name in self._file_of:
                        raise InputError("checkpoint.duplicate", path=file, name=name[:80])
                    view = handle.get_slice(name)
                    self.formats[name], self.shapes[name] = view.get_dtype(), tuple(view.get_shape())
                    self._file_of[name] = file
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError("checkpoint.safetensors", path=file, reason=str(error)[:160]) from None
        for name in self._file_of:
            if self.formats[name] not in FLOATS:
                raise InputError("checkpoint.dtype", path=file, name=name[:80], dtype=self.formats[name])

    def read(self, name: str, dtype: torch.dtype | None, take: Take | None = None) -> Tensor:
        # Opened anew for each tensor: closing gives the pages of the original back.
        with safe_open(self._file_of[name], framework="pt") as handle:
            stored: Tensor = handle.get_tensor(name)
        if take is None:
            return stored.to(dtype or stored.dtype)
        return take(tuple(stored.shape), dtype or stored.dtype).copy_(stored)

    def whereabouts(self, name: str, held: Tensor | Packed) -> tuple[Path, int] | None:
        if isinstance(held, Packed) or held.dtype != FLOATS[self.formats[name]]:
            return None
        file = self._file_of[name]
        return file, tensor_offsets(file)[name]

    def stored_bytes(self) -> dict[str, int]:
        sizes = {
            name: math.prod(shape) * FLOATS[self.formats[name]].itemsize for name, shape in self.shapes.items()
        }
        return _by_format(self.formats, sizes)


def _shards(folder: Path) -> list[Path]:
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    if "model.safetensors" in files:
        return [files["model.safetensors"]]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not files:
            raise InputError("checkpoint.no_weights", path=folder)
        return list(files.values())
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        raise InputError("checkpoint.bad_index", path=index) from None
    for name in names:
        if not isinstance(name, str):
            raise InputError("checkpoint.bad_index", path=index)
        if name not in files:
            raise InputError("checkpoint.missing_shard", path=folder, name=name[:80])
    return [files[name] for name in sorted(names)]


class GGUFWeights:
    """One GGUF file; blocks are unpacked to the dtype asked for, or stay as they are."""

    stored_dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: GGUFHeader = read_header(path)
        self._stored = {checkpoint_name(name): info for name, info in self.header.tensors.items()}
        self.formats = {name: info.block_type for name, info in self._stored.items()}
        self.shapes = {name: info.shape for name, info in self._stored.items()}
        self.config = config_from_gguf(self.header)
        if "rope_freqs.weight" in self._stored:
            divisors = self._divisors()
            if divisors.numel() != self.config.head_dim // 2 or not bool((divisors > 0).all()):
                raise InputError("checkpoint.shapes", path=path, details="rope_freqs.weight")
            self.config = replace(self.config, rope=replace(self.config.rope, divisors=tuple(divisors.tolist())))
            del self.shapes["rope_freqs.weight"]

    def read(self, name: str, dtype: torch.dtype | None, take: Take | None = None) -> Tensor | Packed:
        info, take = self._stored[name], take or _anywhere
        if dtype is None and len(info.shape) == 2 and row_bytes(info.block_type, info.shape[1]):
            return Packed(info.block_type, self._in_place(name, self._blocks(info, take)))
        tensor = take(info.shape, dtype or FLOATS.get(info.block_type, torch.float32))
        unpack_into(tensor, self._blocks(info, _anywhere).view(-1), info.block_type)
        return self._in_place(name, tensor)

    def whereabouts(self, name: str, held: Tensor | Packed) -> tuple[Path, int] | None:
        block_type = self.formats[name]
        same = held.format == block_type if isinstance(held, Packed) else held.dtype == FLOATS.get(block_type)
        return (self.path, self._stored[name].offset) if same and not self._interleaved(name) else None

    def stored_bytes(self) -> dict[str, int]:
        return _by_format(self.formats, {name: info.bytes for name, info in self._stored.items()})

    def _divisors(self) -> Tensor:
        """Of the rotary frequencies, [d/2]."""
        info = self._stored["rope_freqs.weight"]
        divisors = torch.empty(math.prod(info.shape))
        unpack_into(divisors, self._blocks(info, _anywhere).view(-1), info.block_type)
        return divisors

    def _blocks(self, info: TensorInfo, take: Take) -> Tensor:
        """The bytes of a tensor, row by row."""
        rows = math.prod(info.shape[:-1])
        raw = take((rows, info.bytes // rows), torch.uint8)
        with self.path.open("rb") as file:
            file.seek(info.offset)
            if file.readinto(raw.numpy().data) != info.bytes:
                raise InputError("gguf.truncated", path=self.path, at=info.offset, need=info.bytes, size=0)
        return raw

    def _in_place(self, name: str, rows: Tensor) -> Tensor:
        """llama.cpp interleaves the rotary pairs of `llama` files; put rows i and i + d/2 back in place."""
        if not self._interleaved(name):
            return rows
        pairs = rows.view(-1, self.config.head_dim // 2, 2, *rows.shape[1:])
        return rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))

    def _interleaved(self, name: str) -> bool:
        return self.header.architecture == "llama" and (".q_proj." in name or ".k_proj." in name)


def _anywhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _by_format(formats: dict[str, str], sizes: dict[str, int]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, size in sizes.items():
        totals[formats[name]] += size
    return dict(totals)
