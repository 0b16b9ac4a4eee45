"""What a look at the attention leaves behind: frozen records, units in the field names, and the grid to draw.

Every weight is recomputed from the run's own q_rot and cached keys; `reconstruction_error` says how well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from decodescope.analysis.attention import Character

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """One query head in the passes of one step: `rows` are what the queries at `positions` give to each column.

    A row at position p has the p + 1 columns cached for it (0 outside a window); without `keep_rows` none is kept.
    Figures are means over the rows that have such a token: `sink_share` is the weight on position 0, the first
    token; `previous_share` on the token before, `self_share` on itself, `duplicate_share` on all earlier tokens of
    the same id; null where no row has one. Shares may overlap. `character` names the largest from 0.4 on, else
    mixed. `top_position` is the column that the last row gives most to: `top_share`.
    """

    step: int
    layer: int
    head: int
    kv_head: int
    positions: tuple[int, ...]
    entropy_nats: float
    distance_tokens: float
    sink_share: float
    previous_share: float | None
    self_share: float
    duplicate_share: float | None
    character: Character
    top_position: int
    top_share: float
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far pattern x values is from what the layer's own kernel gave, in one step.

    The maximum over the rows looked at of ||a - b|| / ||b||, all query heads of a row together.
    """

    step: int
    layer: int
    reconstruction_error: float


@dataclass(frozen=True, slots=True)
class SequenceToken:
    """A token of the sequence; `step` is null in the prompt, else the step that chose it."""

    position: int
    token_id: int
    text: str
    step: int | None


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """Everything asked for. Step 0 is the pass over the prompt; step s feeds the token that step s - 1 chose."""

    kind: str  # recomputed: the run itself kept its fused kernel
    model: str
    architecture: str
    dtype: str
    device: str
    prompt_tokens: int
    tokens: tuple[SequenceToken, ...]
    query_heads: int
    kv_heads: int
    heads: tuple[HeadAttention, ...]
    layers: tuple[LayerError, ...]
    reconstruction_error: float  # of all layers and steps
    notes: tuple[str, ...]  # things the reader should know: catalogue keys


@dataclass(frozen=True, slots=True)
class Span:
    """Positions that share a bin, the last one included."""

    first: int
    last: int

    @property
    def is_one(self) -> bool:
        """Whether it is a single position."""
        return self.first == self.last


@dataclass(frozen=True, slots=True)
class Grid:
    """All rows of all steps, [L, H, R, C] for the layers and query heads chosen; NaN where nothing is visible.

    Long prompts are pooled: a cell is the largest weight of the rows and columns that it stands for.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    values: Weights
    pooled: tuple[int, int]  # rows and columns that a cell stands for

    def within(self, rows: int, columns: int) -> "Grid":
        """The same in at most so many rows and columns, pooled further where it has more."""
        down, across = -(-len(self.rows) // max(rows, 1)), -(-len(self.columns) // max(columns, 1))
        values = np.fmax.reduceat(self.values, np.arange(0, len(self.rows), down), axis=2)
        values = np.fmax.reduceat(values, np.arange(0, len(self.columns), across), axis=3)
        return replace(
            self,
            rows=_joined(self.rows, down),
            columns=_joined(self.columns, across),
            values=values,
            pooled=(self.pooled[0] * down, self.pooled[1] * across),
        )

    def row_of(self, position: int) -> int:
        """The number of the row that holds a position. Raises ValueError where none does."""
        for number, span in enumerate(self.rows):
            if span.first <= position <= span.last:
                return number
        raise ValueError(f"no row at position {position}")

    def over_heads(self, position: int) -> Weights:
        """What a position gives to each column in each layer [L, C]: the mean over the heads."""
        means: Weights = self.values[:, :, self.row_of(position)].mean(axis=1)
        return means


def spans_of(positions: Sequence[int], width: int) -> tuple[Span, ...]:
    """Positions in bins of `width`."""
    edges = [*range(0, len(positions), width), len(positions)]
    return tuple(Span(positions[start], positions[stop - 1]) for start, stop in pairwise(edges))


def _joined(spans: tuple[Span, ...], count: int) -> tuple[Span, ...]:
    return tuple(Span(group[0].first, group[-1].last) for group in _groups(spans, count))


def _groups(spans: tuple[Span, ...], count: int) -> list[tuple[Span, ...]]:
    return [spans[start : start + count] for start in range(0, len(spans), count)]
