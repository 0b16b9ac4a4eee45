"""Taps beside a run's own one, for what must not be kept whole: the residual stream's growth, tensors' corners."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.analysis.residual import STREAM, StreamChange, stream_change, stream_rows
from decodescope.experiments.forward_records import EdgeRow, Edges
from decodescope.observe.selection import Place
from decodescope.probe import Attended, Shown, attention_pattern

_EDGE = 3  # numbers at either end of a row


class StreamTap:
    """Takes a few numbers a position off the residual stream; holds tensors of one layer at a time."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._rows: dict[int, list[Tensor]] = defaultdict(list)  # layer -> [7, T] of every chunk

    def wants(self, site: str, layer: int | None) -> bool:
        """The stream before, between and after, and what is added to it."""
        return site in STREAM

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """Hold a value until the layer's last one is there."""
        assert isinstance(value, Tensor) and layer is not None
        self._held[site] = value[0]
        if site == "resid_post":
            self._rows[layer].append(stream_rows(**self._held))
            self._held.clear()

    def taken(self, step: int) -> list[StreamChange]:
        """What was seen since the last call, layer by layer."""
        changes = [stream_change(step, layer, torch.cat(rows, dim=1)) for layer, rows in self._rows.items()]
        self._rows.clear()
        return changes


class _Corner(NamedTuple):
    heads: tuple[tuple[int, ...], ...]  # the index before the position: a head, or nothing
    numbers: Float[Tensor, "n X"]


class EdgeTap:
    """Copies the corners of the chosen values."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places, self._chosen = places, frozenset(places)
        self._first: dict[Place, _Corner] = {}
        self._last: dict[Place, _Corner] = {}

    def wants(self, site: str, layer: int | None) -> bool:
        """Whether this value was chosen."""
        return (site, layer) in self._chosen

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """Keep the first row of the first chunk, and the last row so far."""
        place = (site, layer)
        if place not in self._first:
            self._first[place] = _corner(site, value, 0)
        self._last[place] = _corner(site, value, -1)

    def taken(self, step: int, positions: range) -> list[Edges]:
        """What was seen since the last call, in the order of the places; `positions` are those of the step."""
        found = []
        for site, layer in (place for place in self._places if place in self._first):
            rows = _rows(self._first[site, layer], positions[0])
            if len(positions) > 1:
                rows += _rows(self._last[site, layer], positions[-1])
            found.append(Edges(step, layer, site, tuple(sorted(rows, key=lambda row: row.index))))
        self._first.clear()
        self._last.clear()
        return found


def _corner(site: str, value: Shown, row: int) -> _Corner:
    """The ends of one row of a value, without its batch axis, in its first and its last head."""
    if isinstance(value, Attended):
        at = range(value.q_rot.shape[2])[row]
        scores = value.scores(slice(at, at + 1))
        value, row = attention_pattern(scores) if site == "pattern" else scores, 0
    numbers = value[0].select(-2, row)  # X, or H X
    if numbers.shape[-1] > 2 * _EDGE:
        numbers = torch.cat((numbers[..., :_EDGE], numbers[..., -_EDGE:]), dim=-1)
    if numbers.ndim == 1:
        return _Corner(((),), numbers[None].clone())
    heads = sorted({0, len(numbers) - 1})
    return _Corner(tuple((head,) for head in heads), numbers[heads])


def _rows(corner: _Corner, position: int) -> list[EdgeRow]:
    rows = []
    for head, numbers in zip(corner.heads, corner.numbers.tolist(), strict=True):
        ends = (numbers[:_EDGE], numbers[_EDGE:]) if len(numbers) == 2 * _EDGE else (numbers, [])
        rows.append(EdgeRow((*head, position), *map(tuple, ends)))
    return rows
