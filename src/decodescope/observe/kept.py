"""Whole tensors, kept within a budget of bytes: in memory, or in the run folder once they are written there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Shaped
from safetensors import safe_open
from torch import Tensor

from decodescope.observe.selection import Place
from decodescope.trace.site_records import address
from decodescope.trace.tensors import SavedTensor


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor that was asked for and did not fit into what was left of the budget."""

    step: int
    layer: int | None
    site: str
    bytes: int


@dataclass(frozen=True, slots=True)
class _Saved:
    """Where a tensor lies once it is on disk."""

    path: Path
    name: str

    def read(self) -> Tensor:
        with safe_open(self.path, "pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
            return tensor


class KeptTensors:
    """Tensors [..., T, X] by place and step: `bytes` stays within the budget; what did not fit is in `dropped`."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.bytes = budget_bytes, 0
        self._dropped: dict[int, dict[Place, int]] = {}  # bytes, by step
        self._steps: dict[int, dict[Place, list[Tensor] | _Saved]] = {}

    @property
    def dropped(self) -> list[Dropped]:
        """What was to be kept and did not fit, in the order of its coming."""
        return [
            Dropped(step, layer, site, size)
            for step, sizes in self._dropped.items()
            for (site, layer), size in sizes.items()
        ]

    def begin(self, step: int) -> None:
        """A step starts, or starts again: what was kept of it is forgotten."""
        for place in list(self._steps.setdefault(step, {})):
            self.forget(step, place)
        self._dropped.pop(step, None)

    def forget_from(self, step: int) -> None:
        """What was kept of `step` and later ones is of no branch any more; what lies on disk stays there."""
        for later in [each for each in self._steps if each >= step]:
            self.begin(later)
            del self._steps[later]

    def forget(self, step: int, place: Place) -> None:
        """What was kept, or dropped, of one value was only on the way to one that comes now."""
        parts = self._steps[step].pop(place, [])
        self.bytes -= 0 if isinstance(parts, _Saved) else _size(parts)
        self._dropped.get(step, {}).pop(place, None)

    def fits(self, step: int, place: Place, size: int) -> bool:
        """Whether `size` more bytes of a tensor fit; if not, the whole tensor is dropped, earlier parts too."""
        dropped = self._dropped.setdefault(step, {})
        if place in dropped:
            dropped[place] += size
            return False
        if self.bytes + size <= self.budget_bytes:
            return True
        before = self.bytes
        self.forget(step, place)
        dropped[place] = before - self.bytes + size
        return False

    def add(self, step: int, place: Place, part: Shaped[Tensor, "... T Y"]) -> None:
        """Keep the next positions of a tensor, on the CPU. Ask `fits` first.

        Nothing in a forward pass changes a value once it is made, so it is held, and copied when looked at.
        """
        parts = self._steps[step].setdefault(place, [])
        assert isinstance(parts, list)
        parts.append(part.cpu())
        self.bytes += part.nbytes

    def of_step(self, step: int) -> dict[str, Tensor]:
        """The tensors of one step by address, each whole."""
        kept = self._steps.get(step, {})
        return {address(*place): _whole(parts) for place, parts in kept.items()}

    def saved(self, step: int, folder: Path, entries: list[SavedTensor]) -> None:
        """The tensors of a step lie in the run folder now: memory lets go of them. They still count as kept."""
        files = {entry.name: folder / entry.file for entry in entries}
        kept = self._steps[step]
        for place in [place for place in kept if address(*place) in files]:
            kept[place] = _Saved(files[address(*place)], address(*place))

    def tensors(self, place: Place) -> Mapping[int, Tensor]:
        """One place by step; read from disk, or joined from its parts, when looked up."""
        return _BySteps({step: kept[place] for step, kept in self._steps.items() if place in kept})

    def places(self) -> frozenset[Place]:
        """All that something is kept of."""
        return frozenset(place for kept in self._steps.values() for place in kept)


class _BySteps(Mapping[int, Tensor]):
    def __init__(self, kept: dict[int, list[Tensor] | _Saved]) -> None:
        self._kept = kept

    def __getitem__(self, step: int) -> Tensor:
        return _whole(self._kept[step])

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _whole(parts: list[Tensor] | _Saved) -> Tensor:
    if isinstance(parts, _Saved):
        return parts.read()
    if len(parts) > 1 or parts[0].is_inference():
        with torch.inference_mode(False):  # so that it can be used like any tensor
            parts[:] = [torch.cat(parts, dim=-2)]
    return parts[0]


def _size(parts: list[Tensor]) -> int:
    return sum(part.nbytes for part in parts)
