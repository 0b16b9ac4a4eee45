"""RaggedCache: caches of sequences whose pasts differ in length, side by side for one pass over the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from decodescope.model.cache_formats import Held
from decodescope.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """Keys or values of rows that differ in length."""

    rows: tuple[Held, ...]

    @property
    def shape(self) -> torch.Size:
        """B, K, S of the longest, d."""
        shapes = [held.shape for held in self.rows]
        return torch.Size((len(shapes), shapes[0][1], max(shape[2] for shape in shapes), shapes[0][3]))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.rows[0].device

    def float(self) -> Float[Tensor, "B K S d"]:
        """The values in float32, zeros before those of shorter rows."""
        longest = self.shape[2]
        return torch.cat([F.pad(held.float(), (0, 0, longest - held.positions, 0)) for held in self.rows])


class RaggedCache:
    """One KVCache for every batch row, each of a single sequence.

    Every row keeps its own memory and attends as it would alone; nothing is padded, and a row that joins or
    leaves moves none of the others.
    """

    def __init__(self, rows: Sequence[KVCache]) -> None:
        self._rows = rows
        self.length = max(row.length for row in rows)

    def padding(self, device: torch.device) -> Tensor:
        """How much shorter than the longest each past is, [B]: the positions of new tokens follow from it."""
        return torch.tensor([self.length - row.length for row in self._rows], device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple["HeldRows", "HeldRows"]:
        """Store k, v [B, K, T, d] behind each row's committed positions; return all that each row holds."""
        new = [(k[row : row + 1], v[row : row + 1]) for row in range(len(k))]
        held = [row.append(layer, *each) for row, each in zip(self._rows, new, strict=True)]
        keys, values = zip(*held, strict=True)
        return HeldRows(keys), HeldRows(values)

    def advance(self, count: int) -> None:
        """Commit `count` positions that every layer has appended."""
        for row in self._rows:
            row.advance(count)


Cache = KVCache | RaggedCache
