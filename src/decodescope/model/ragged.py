"""RaggedCache: caches of sequences whose pasts differ in length, side by side for one pass over the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decodescope.model.cache_formats import Held
from decodescope.model.kv_cache import KVCache


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

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
        """Store k, v [B, K, T, d] behind each row's committed positions; return all that each row holds."""
        parts = zip(self._rows, k.split(1), v.split(1), strict=True)
        keys, values = zip(*(row.append(layer, *new) for row, *new in parts), strict=True)
        return keys, values

    def advance(self, count: int) -> None:
        """Commit `count` positions that every layer has appended."""
        for row in self._rows:
            row.advance(count)


Cache = KVCache | RaggedCache
