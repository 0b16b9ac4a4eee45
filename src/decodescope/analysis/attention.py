"""What attention patterns say: how broadly, how far and at what a head looks; and patterns made small for drawing.

A pattern [H, R, S] holds rows of one sequence without padding: row r is what the query at `positions[r]` gives to
each of the S columns, 0 where it may not look.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Character = Literal["previous", "self", "duplicate", "first", "mixed"]

FIGURES = ("entropy_nats", "distance_tokens", "sink_share", "previous_share", "self_share", "duplicate_share")
CHARACTER_FROM = 0.4  # a share; what is spread more evenly has no single character
_INVISIBLE = -1.0  # below every weight


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """The `FIGURES` of a head over some rows; None where no row has such a token."""

    entropy_nats: float
    distance_tokens: float
    sink_share: float
    previous_share: float | None
    self_share: float
    duplicate_share: float | None

    @property
    def character(self) -> Character:
        """The name of the largest share from `CHARACTER_FROM` on, else mixed; of equal ones the first named."""
        shares: dict[Character, float] = {
            "previous": self.previous_share or 0.0,
            "self": self.self_share,
            "duplicate": self.duplicate_share or 0.0,
            "first": self.sink_share,
        }
        largest = max(shares, key=lambda name: shares[name])
        return largest if shares[largest] >= CHARACTER_FROM else "mixed"


def row_figures(
    pattern: Float[Tensor, "H R S"], positions: Int[Tensor, " R"], ids: Int[Tensor, " N"]
) -> Float[Tensor, "6 H R"]:
    """The `FIGURES` of every head and row; `ids` are the sequence's, at least S of them.

    Entropy is -sum p ln p; distance the mean number of tokens looked back; the shares are the weights on position
    0 (where heads with nothing to do look, https://arxiv.org/abs/2309.17453), on the token before, on the token
    itself, and on all earlier tokens of the same id (https://arxiv.org/abs/2211.00593). They may overlap: the
    first token can be the one before. A share is 0 in rows that have no such token (`has_figures`).
    """
    back = positions[:, None] - torch.arange(pattern.shape[2], device=pattern.device)  # R S
    twins = _twins(positions, ids, back)
    figures = (
        torch.special.entr(pattern).sum(-1),
        torch.einsum("hrs,rs->hr", pattern, back.float()),
        pattern[..., 0],
        _weight_at(pattern, (positions - 1).clamp(min=0)) * (positions > 0),
        _weight_at(pattern, positions),
        torch.einsum("hrs,rs->hr", pattern, twins.float()),
    )
    return torch.stack(figures)


def has_figures(positions: Int[Tensor, " R"], ids: Int[Tensor, " N"]) -> Bool[Tensor, "6 R"]:
    """Which of the `FIGURES` a row has: the first has no token before it, and few have an earlier same one."""
    back = positions[:, None] - torch.arange(len(ids), device=ids.device)  # R N
    every = torch.ones_like(positions, dtype=torch.bool)
    return torch.stack([every, every, every, positions > 0, every, _twins(positions, ids, back).any(-1)])


def head_figures(sums: Float[Tensor, " 6"], counts: Int[Tensor, " 6"]) -> HeadFigures:
    """One head's figures from their sums over rows and how many rows have each."""
    entropy, distance, sink, previous, itself, duplicate = (sums / counts).tolist()
    return HeadFigures(
        entropy_nats=entropy,
        distance_tokens=distance,
        sink_share=sink,
        previous_share=previous if counts[3] else None,
        self_share=itself,
        duplicate_share=duplicate if counts[5] else None,
    )


def kv_head_of(head: int, heads: int, kv_heads: int) -> int:
    """The key/value head that a query head reads (grouped-query attention, https://arxiv.org/abs/2305.13245)."""
    return head * kv_heads // heads


class PooledPattern:
    """A pattern [H, R, C] in bins, filled block by block: a cell is the largest weight of all that it stands for.

    The largest and not the mean: a single token looked at among thousands must stay visible.
    """

    def __init__(self, heads: int, rows: int, columns: int, most_bins: int) -> None:
        self.row_width, self.column_width = -(-rows // most_bins), -(-columns // most_bins)
        shape = (heads, -(-rows // self.row_width), -(-columns // self.column_width))
        self._largest = torch.full(shape, _INVISIBLE)

    def add(self, pattern: Float[Tensor, "H R S"], seen: Bool[Tensor, "1 R S"] | None, row: int) -> None:
        """The next rows, the first of them number `row`; `seen` None means that they see all their columns."""
        shown = pattern if seen is None else pattern.masked_fill(~seen, _INVISIBLE)
        bins, width = self._largest.shape[2], self.column_width
        wide = F.pad(shown, (0, bins * width - shown.shape[2]), value=_INVISIBLE)
        narrow = wide.reshape(*wide.shape[:2], bins, width).amax(-1).to(self._largest)  # H R C
        places = torch.arange(row, row + pattern.shape[1]) // self.row_width
        self._largest.scatter_reduce_(1, places[None, :, None].expand_as(narrow), narrow, "amax")

    def values(self) -> Float[Tensor, "H R C"]:
        """The largest weights; NaN in bins where no row sees a column."""
        return self._largest.where(self._largest >= 0, torch.nan)


def _weight_at(pattern: Float[Tensor, "H R S"], columns: Int[Tensor, " R"]) -> Float[Tensor, "H R"]:
    return pattern.gather(2, columns[None, :, None].expand(len(pattern), -1, 1))[..., 0]


def _twins(positions: Int[Tensor, " R"], ids: Int[Tensor, " N"], back: Int[Tensor, "R S"]) -> Bool[Tensor, "R S"]:
    """Which earlier columns hold the id of the row's own token."""
    return (ids[positions][:, None] == ids[: back.shape[1]]) & (back > 0)
