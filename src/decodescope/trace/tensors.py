"""Blocks of tensors beside the database: safetensors files that appear whole or not at all."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSORS = "tensors"  # their folder inside the run folder


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Where a tensor lies: `file` inside the run folder; `node` is None before the first step."""

    file: str
    name: str
    node: int | None
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def block_file(block: int) -> str:
    """The path of a block inside the run folder."""
    return f"{TENSORS}/{block:04d}.safetensors"


def write_block(folder: Path, block: int, node: int | None, tensors: Mapping[str, Any]) -> list[SavedTensor]:
    """Write numpy arrays or torch tensors (any device) to block `block`: temporary name, fsync, rename.

    Tensors must not share memory. Raises OSError; then nothing is left behind.
    """
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    target = folder / block_file(block)
    partial = target.with_suffix(".partial")
    target.parent.mkdir(exist_ok=True)
    try:
        _write_synced(partial, _serialised(plain))
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return [_entry(block, node, name, tensor) for name, tensor in plain.items()]


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever holds a torch tensor has imported torch
    return torch is not None and isinstance(tensor, torch.Tensor)


def _plain(tensor: Any) -> Any:
    if _is_torch(tensor):
        return tensor.detach().cpu().contiguous()
    import numpy as np

    return np.ascontiguousarray(tensor).reshape(np.shape(tensor))


def _serialised(tensors: dict[str, Any]) -> bytes:
    if any(map(_is_torch, tensors.values())):
        import torch
        from safetensors.torch import save as save_torch

        return save_torch({name: torch.as_tensor(tensor) for name, tensor in tensors.items()})
    from safetensors.numpy import save as save_numpy

    return save_numpy(tensors)


def _write_synced(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with path.open("xb") as file:  # never through a link that lies there
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(block: int, node: int | None, name: str, tensor: Any) -> SavedTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(block_file(block), name, node, dtype, tuple(tensor.shape), int(tensor.nbytes))
