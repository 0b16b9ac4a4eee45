"""Layers on disk: each is read while those before it compute, and let go afterwards; the forward pass knows
nothing of it.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from decodescope.errors import ResourceError
from decodescope.model.decoder import Block, CausalLM
from decodescope.model.kernels import Arena, Packed
from decodescope.model.linear import Matrix
from decodescope.model.on_disk import DiskFile, OnDisk
from decodescope.model.weights import Weights
from decodescope.models.cache import cache_root

_LAYER_MATRIX = re.compile(r"model\.layers\.(\d+)\..*_proj\.weight")
_LINE = 64  # bytes: matrices start at a cache line, as they do in memory that stays

Brought = dict[str, Tensor | Packed]  # name of a matrix in its block -> what it holds meanwhile


def spread(count: int, layers: int) -> frozenset[int]:
    """Which `count` of the layers lie on disk: evenly spread, so that those between compute while one is read."""
    return frozenset((2 * i + 1) * layers // (2 * count) for i in range(count))


def layer_on_disk(name: str, on_disk: frozenset[int]) -> int | None:
    """The layer of a tensor that lies there: the matrices of such a layer do, its few vectors stay in memory."""
    found = _LAYER_MATRIX.fullmatch(name)
    return int(found[1]) if found and int(found[1]) in on_disk else None


class Shelf:
    """Where the matrices of some layers are put while a model is loaded.

    What lies in the checkpoint exactly as it is held stays there. The rest is written to a file without a name in
    our corner of the disk, which goes when the model goes.
    """

    def __init__(self, weights: Weights, layers: frozenset[int], as_stored: bool) -> None:
        """`as_stored` False: matrices may look like stored ones and be others."""
        self._weights, self._layers, self._as_stored = weights, layers, as_stored
        self._opened: dict[Path, DiskFile] = {}
        self._written: DiskFile | None = None

    def holds(self, name: str) -> bool:
        """Whether the tensor of this name belongs here."""
        return layer_on_disk(name, self._layers) is not None

    def put(self, name: str, held: Tensor | Packed) -> OnDisk:
        """Put one matrix here. Raises ResourceError where the disk is full."""
        content, dtype = (held.blocks, None) if isinstance(held, Packed) else (held, held.dtype)
        place = self._weights.whereabouts(name, held) if self._as_stored else None
        if place is None:
            file = self._written = self._written or _nameless()
            offset = file.append(content)
        else:
            file, offset = self._open(place[0]), place[1]
        rows, columns = held.shape
        kind = held.format if isinstance(held, Packed) else str(dtype).removeprefix("torch.")
        return OnDisk(file, offset, content.nbytes, (rows, columns), kind, dtype)

    def _open(self, path: Path) -> DiskFile:
        if path not in self._opened:
            self._opened[path] = DiskFile(path.open("rb"), path)
        return self._opened[path]


def _nameless() -> DiskFile:
    folder = cache_root() / "layers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return DiskFile(tempfile.TemporaryFile(dir=folder), folder)
    except OSError as error:
        raise ResourceError("disk.write", path=folder, reason=error.strerror) from None


def matrices_on_disk(module: nn.Module) -> dict[str, OnDisk]:
    """The matrices of a module that lie on disk, by their names in it."""
    named = ((name, each.weight) for name, each in module.named_modules() if isinstance(each, Matrix))
    return {name: weight for name, weight in named if isinstance(weight, OnDisk)}


def stream_layers(model: CausalLM) -> None:
    """Make the layers that lie on disk come and go. Two of them are in memory at a time, as `model.slots`."""
    layers = {block.layer: matrices_on_disk(block) for block in _blocks(model)}
    stream = _Stream({layer: matrices for layer, matrices in layers.items() if matrices})
    model.register_buffer("slots", stream.slots, persistent=False)
    for layer in stream.order:
        block = model.model.layers[layer]
        block.register_forward_pre_hook(stream.bring_in)
        block.register_forward_hook(stream.let_go)


def layers_on_disk(model: CausalLM) -> int:
    """How many layers lie there."""
    return sum(bool(matrices_on_disk(block)) for block in _blocks(model))


def measured_read_speed(model: CausalLM) -> float:
    """Bytes a second that the disk gives for one layer, when the system does not have it in memory already."""
    matrices = next(found for block in _blocks(model) if (found := list(matrices_on_disk(block).values())))
    for matrix in matrices:
        matrix.file.forget()
    memory = torch.empty(max(matrix.nbytes for matrix in matrices), dtype=torch.uint8)
    started = time.perf_counter()
    for matrix in matrices:
        matrix.read(memory[: matrix.nbytes])
    return sum(matrix.nbytes for matrix in matrices) / (time.perf_counter() - started)


def _blocks(model: CausalLM) -> Iterator[Block]:
    return (block for block in model.model.layers if isinstance(block, Block))


class _Stream:
    """Two slots in memory: for the layer that computes, and for the next. It knows blocks only as they call."""

    def __init__(self, layers: dict[int, dict[str, OnDisk]]) -> None:
        self._layers, self.order = layers, sorted(layers)
        size = max(sum(map(_padded, matrices.values())) for matrices in layers.values())
        self.slots = Arena(2 * size).take((2, size), torch.uint8)
        self._reader = ThreadPoolExecutor(1, "layers-on-disk")
        self._coming: Future[Brought] | None = None
        self._wanted, self._slot = -1, 0  # the layer that is coming, and where to
        self._inside: Block | None = None  # the block that computes, or was broken off at it

    def bring_in(self, block: nn.Module, _arguments: object) -> None:
        """Before a block computes: its matrices are there, and the next layer's are on their way."""
        assert isinstance(block, Block)
        self.let_go()
        coming, self._coming = self._coming, None
        if coming is None or self._wanted != block.layer:  # the first pass, or one after a broken off one
            coming = self._send_for(block.layer)
        self._inside = block
        for name, matrix in coming.result().items():
            _matrix(block, name).hold(matrix)
        following = self.order[(self.order.index(block.layer) + 1) % len(self.order)]
        self._coming = self._send_for(following)

    def let_go(self, *_: object) -> None:
        """After a block has computed: its memory is for the next but one."""
        if self._inside is not None:
            for name, matrix in self._layers[self._inside.layer].items():
                _matrix(self._inside, name).hold(matrix)
        self._inside = None

    def _send_for(self, layer: int) -> Future[Brought]:
        # One reader, slots in turn: the one in use is left alone.
        self._wanted, self._slot = layer, 1 - self._slot
        return self._reader.submit(self._read, layer, self._slot)

    def _read(self, layer: int, slot: int) -> Brought:
        found, at = {}, 0
        for name, matrix in self._layers[layer].items():
            found[name] = matrix.read(self.slots[slot, at : at + matrix.nbytes])
            at += _padded(matrix)
        return found


def _padded(matrix: OnDisk) -> int:
    return -(-matrix.nbytes // _LINE) * _LINE


def _matrix(block: Block, name: str) -> Matrix:
    found = block.get_submodule(name)
    assert isinstance(found, Matrix)
    return found
