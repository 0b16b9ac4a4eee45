"""A tap that reads attention patterns row by row while the run keeps its fused kernel.

Of a pattern only a block of rows exists at any time, whatever the prompt's length: figures are summed up, the grid
is filled bin by bin, and rows are kept only where they were asked for.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from decodescope.analysis.attention import (
    FIGURES,
    HeadFigures,
    PooledPattern,
    has_figures,
    head_figures,
    row_figures,
)
from decodescope.probe import Attended, Shown, attention_pattern


@dataclass(frozen=True, slots=True)
class Asked:
    """What to look at: layers, query heads, and the positions of the rows, all in rising order."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    bins: int  # rows and columns of the grid, at most
    keep_rows: bool

    @property
    def weights(self) -> int:
        """How many weights the rows hold, of all layers and heads."""
        return len(self.layers) * len(self.heads) * sum(row + 1 for row in self.rows)


class LayerReading:
    """What is known of one layer in one step."""

    def __init__(self, heads: int) -> None:
        self.positions: list[int] = []
        self.rows: list[Float[Tensor, "H S"]] = []
        self.last: Float[Tensor, "H S"] = torch.empty(heads, 0)
        self.error = 0.0
        self._sums = torch.zeros(len(FIGURES), heads, dtype=torch.float64)
        self._counts = torch.zeros(len(FIGURES), dtype=torch.int64)

    def add(
        self, pattern: Float[Tensor, "H R S"], positions: Int[Tensor, " R"], ids: Int[Tensor, " N"], error: float
    ) -> None:
        """The next rows; `error` is the largest of theirs."""
        self.positions += positions.tolist()
        self.last = pattern[:, -1].cpu()
        self.error = float(np.maximum(self.error, error))  # NaN wins
        self._sums = self._sums + row_figures(pattern, positions, ids).cpu().double().sum(-1)
        self._counts = self._counts + has_figures(positions, ids).sum(-1).cpu()

    def keep(self, pattern: Float[Tensor, "H R S"], positions: Int[Tensor, " R"]) -> None:
        """Keep the next rows themselves, each as far as it can see."""
        self.rows += [pattern[:, row, : position + 1].cpu() for row, position in enumerate(positions.tolist())]

    def figures(self, head: int) -> HeadFigures:
        """What is known of one head: means over its rows."""
        return head_figures(self._sums[:, head], self._counts)


class AttentionReading:
    """The tap: by step and layer what is known, and by layer the grid over all steps."""

    def __init__(self, asked: Asked, prompt_ids: Sequence[int]) -> None:
        self.asked, self.step = asked, 0
        self.layers: dict[tuple[int, int], LayerReading] = {}
        self.grids: dict[int, PooledPattern] = {}
        self._ids = torch.tensor(prompt_ids)

    def next_step(self, token_id: int) -> None:
        """The step is over; the passes of the next one feed `token_id`."""
        self.step += 1
        self._ids = torch.cat([self._ids, torch.tensor([token_id])])

    def wants(self, site: str, layer: int | None) -> bool:
        """The patterns of the layers asked for."""
        return site == "pattern" and layer in self.asked.layers

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """Recompute the rows asked for of one layer in one pass."""
        assert layer is not None and isinstance(value, Attended)
        first = value.keys.shape[2] - value.q_rot.shape[2]
        ids, heads = self._ids.to(value.keys.device), list(self.asked.heads)
        for rows in self._blocks(value, first):
            pattern = attention_pattern(value.scores(rows))
            error = value.error(pattern, rows)
            positions = torch.arange(first + rows.start, first + rows.stop, device=ids.device)
            reading, grid = self._of(layer)
            chosen = pattern[0] if len(heads) == pattern.shape[1] else pattern[0, heads]
            reading.add(chosen, positions, ids, error)
            seen = value.seen(rows)
            grid.add(chosen, None if seen is None else seen[0], bisect_left(self.asked.rows, first + rows.start))
            if self.asked.keep_rows:
                reading.keep(chosen, positions)

    def _of(self, layer: int) -> tuple[LayerReading, PooledPattern]:
        heads, rows = len(self.asked.heads), self.asked.rows
        if layer not in self.grids:
            self.grids[layer] = PooledPattern(heads, len(rows), rows[-1] + 1, self.asked.bins)
        return self.layers.setdefault((self.step, layer), LayerReading(heads)), self.grids[layer]

    def _blocks(self, value: Attended, first: int) -> Iterator[slice]:
        """The rows asked for that are in this pass, as runs without gaps, each within a block."""
        for block in value.blocks():
            start = bisect_left(self.asked.rows, first + block.start)
            stop = bisect_left(self.asked.rows, first + block.stop)
            numbered = enumerate(self.asked.rows[start:stop])
            for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
                positions = [position for _, position in run]
                yield slice(positions[0] - first, positions[-1] + 1 - first)
