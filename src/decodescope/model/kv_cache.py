"""KVCache: the keys and values of all positions so far, as a value that can be forked, cut and counted."""

import torch
from torch import Tensor

from decodescope.model.cache_formats import (
    TURNED,
    Held,
    Stored,
    centre_of,
    has_scales,
    joined,
    room,
    total_bytes,
    turned,
)

_BLOCK = 256  # positions; buffers grow in whole blocks
_FORK_BLOCK = 32  # of a fork, which may be one of many

_Pair = tuple[Stored, Stored]  # keys and values, each [B, K, positions, d]


class KVCache:
    """Keys and values per layer, each [B, K, length, d], in the dtype they come in or in `dtype`, one of
    `cache_formats.FORMATS`.

    `length` is the only position there is. A forward pass appends layer by layer and commits once with
    `advance`; a pass that fails half way leaves the cache as it was.

    A fork looks at its parent's memory for the past they share (`stem`) and has memory of its own for what it
    adds, so that it costs what it adds. Whoever would write where a fork looks copies first. The fork of a
    single row may go on as several rows; each of them then has that row's past.

    `most` is how many positions will ever be wanted (None: unknown): memory grows no further ahead than that.
    """

    def __init__(self, num_layers: int, dtype: torch.dtype | None = None, most: int | None = None) -> None:
        self.length, self.dtype, self.most = 0, dtype, most
        self._stem = 0  # positions that lie in other caches' memory
        self._stems: list[list[_Pair]] = [[] for _ in range(num_layers)]
        self._own: list[_Pair | None] = [None] * num_layers
        self._lent = [0] * num_layers  # leading positions of the own memory that forks look at
        self._centres: list[Tensor | None] = [None] * num_layers  # that keys in bytes are held less

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Held, Held]:
        """Store k, v [B, K, T, d] behind the committed positions; return all keys and values [B, K, S, d]."""
        start = self.length - self._stem
        end = start + k.shape[2]
        keys, values = self._with_room(layer, k, end)
        keys.write(start, self._less_centre(layer, k))
        values.write(start, v)
        return self._whole(layer, end)

    def advance(self, count: int) -> None:
        """Commit `count` positions that every layer has appended."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on. Raises ValueError beyond the present length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        self.length = length
        if length < self._stem:
            self._stems = [_first(pairs, length) if length else [] for pairs in self._stems]
            self._stem = length
            self._own = [None] * len(self._own)

    def fork(self) -> "KVCache":
        """A second cache with the same past, in the same memory."""
        child, own = KVCache(len(self._own), self.dtype), self.length - self._stem
        child.length = child._stem = self.length
        child._centres = list(self._centres)
        for layer, pair in enumerate(self._own):
            child._stems[layer] = list(self._stems[layer])
            if pair is not None and own:
                child._stems[layer] += _first([pair], own)
                self._lent[layer] = max(self._lent[layer], own)
        return child

    def copy(self, length: int, most: int | None = None) -> "KVCache":
        """A second cache with the first `length` positions of this one, in memory of its own."""
        child = KVCache(len(self._own), self.dtype, most)
        child.length, child._centres = length, list(self._centres)
        for layer in range(len(self._own) if length else 0):
            child._own[layer] = self._joined(layer, length)
        return child

    def shrink(self, most: int | None = None) -> None:
        """Give back the memory that no position takes, layer by layer; from now on `most` positions are wanted."""
        self.most = most
        for layer in range(len(self._own)):
            if self.length:
                self._own[layer] = self._joined(layer, self.length)
            self._stems[layer] = []
        self._stem, self._lent = 0, [0] * len(self._own)

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these batch rows, in this order."""
        for layer, pair in enumerate(self._own):
            self._own[layer] = None if pair is None else (pair[0].rows(rows), pair[1].rows(rows))
            # A past of one row is everybody's.
            self._stems[layer] = [
                (keys, values) if keys.numbers.shape[0] == 1 else (keys.rows(rows), values.rows(rows))
                for keys, values in self._stems[layer]
            ]
            centre = self._centres[layer]
            self._centres[layer] = centre if centre is None or centre.shape[0] == 1 else centre[rows]
        self._lent = [0] * len(self._lent)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one layer as plain tensors, [B, K, length, d]; see `held`."""
        keys, values = self.held(layer)
        return keys.plain(), values.plain()

    def held(self, layer: int) -> tuple[Held, Held]:
        """Committed keys and values of one layer as they are stored. Raises ValueError while it is empty."""
        if self._own[layer] is None and not self._stems[layer]:
            raise ValueError(f"layer {layer} holds nothing yet")
        return self._whole(layer, self.length - self._stem)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of one batch row, over all layers."""
        pairs = [own or next(iter(stems), None) for own, stems in zip(self._own, self._stems, strict=True)]
        return sum(total_bytes(pair) // _positions(pair[0]) for pair in pairs if pair)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the past that lies in the memory of the caches this one was forked from."""
        return sum(total_bytes(pair) for pairs in self._stems for pair in pairs)

    @property
    def own_bytes(self) -> int:
        """Bytes of this cache's own memory, room not yet used included."""
        return sum(total_bytes(pair) for pair in self._own if pair)

    @property
    def used_bytes(self) -> int:
        """Bytes that the committed positions take, over all layers and batch rows; a shared past counts once."""
        own = self.length - self._stem
        return self.shared_bytes + sum(total_bytes(*_first([pair], own)) for pair in self._own if pair)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the shared past and of all own memory."""
        return self.shared_bytes + self.own_bytes

    def _whole(self, layer: int, own: int) -> tuple[Held, Held]:
        """Keys and values of the stem and the first `own` positions behind it."""
        pair, stems, centre = self._own[layer], self._stems[layer], self._centres[layer]
        if pair and not stems:
            return Held((pair[0].first(own),), centre), Held((pair[1].first(own),))
        keys, values = zip(*(stems + _first([pair], own) if pair else stems), strict=True)
        return Held(keys, centre), Held(values)

    def _joined(self, layer: int, length: int) -> _Pair:
        """A copy of the first `length` positions of a layer."""
        pair = self._own[layer]
        held = _first(self._stems[layer] + ([pair] if pair else []), length)
        return joined(keys for keys, _ in held), joined(values for _, values in held)

    def _less_centre(self, layer: int, k: Tensor) -> Tensor:
        """Keys as they are to be held: in bytes less the centre of the first ones."""
        if not has_scales(self.dtype):
            return k
        centre = self._centres[layer]
        if centre is None or self.length == 0:
            centre = self._centres[layer] = centre_of(k)
        return turned(k - centre) if self.dtype == TURNED else k - centre

    def _with_room(self, layer: int, like: Tensor, end: int) -> _Pair:
        """The layer's own memory with room for `end` positions, its first free to be written."""
        pair, start = self._own[layer], self.length - self._stem
        capacity = 0 if pair is None else pair[0].numbers.shape[2]
        if pair is not None and end <= capacity and start >= self._lent[layer]:
            return pair
        if end > capacity:
            # Half as much again: growing token by token copies each position a bounded number of times.
            block, wanted = _FORK_BLOCK if self._stem else _BLOCK, max(end, capacity + capacity // 2)
            capacity = -(-wanted // block) * block
            if self.most is not None:
                capacity = max(min(capacity, self.most - self._stem), end)
        grown = room(like, self.dtype, capacity), room(like, self.dtype, capacity)
        if pair is not None:
            for new, old in zip(grown, pair, strict=True):
                new.take(old, start)
        self._own[layer], self._lent[layer] = grown, 0
        return grown


def _first(pairs: list[_Pair], count: int) -> list[_Pair]:
    """The first `count` positions of pairs that follow one another."""
    found: list[_Pair] = []
    for keys, values in pairs:
        found.append((keys.first(count), values.first(count)))
        count -= found[-1][0].numbers.shape[2]
        if count <= 0:
            break
    return found


def _positions(stored: Stored) -> int:
    """Positions of all batch rows."""
    return stored.numbers.shape[0] * stored.numbers.shape[2]
