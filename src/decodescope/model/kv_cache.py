"""KVCache: the keys and values of all positions so far, as a value that can be forked, cut and counted."""

import torch
from torch import Tensor

_BLOCK = 256  # positions; buffers grow in whole blocks


class KVCache:
    """Keys and values per layer, each [B, K, length, d].

    `length` is the only position there is. A forward pass appends layer by layer and commits once with
    `advance`; a pass that fails half way leaves the cache as it was. A fork shares its parent's buffers
    until one of the two writes.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._shared = [False] * num_layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, T, d] behind the committed positions; return all keys and values [B, K, S, d]."""
        end = self.length + k.shape[2]
        self._make_room(layer, k, end)
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, count: int) -> None:
        """Commit `count` positions that every layer has appended."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on. Raises ValueError beyond the present length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        self.length = length

    def fork(self) -> "KVCache":
        """A second cache with the same past; memory is shared until either one appends."""
        child = KVCache(len(self._keys))
        child.length = self.length
        child._keys, child._values = list(self._keys), list(self._values)
        self._shared = [True] * len(self._shared)
        child._shared = list(self._shared)
        return child

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these batch rows, in this order."""
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = None if buffer is None else buffer[rows]
        self._shared = [False] * len(self._shared)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one layer, [B, K, length, d]. Raises ValueError while it is empty."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise ValueError(f"layer {layer} holds nothing yet")
        return keys[:, :, : self.length], values[:, :, : self.length]

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of one batch row, over all layers."""
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in self._buffers())

    @property
    def used_bytes(self) -> int:
        """Bytes that the committed positions take, over all layers and batch rows."""
        return sum(b[:, :, : self.length].numel() * b.element_size() for b in self._buffers())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers, room not yet used included. Buffers shared by forks count in each."""
        return sum(b.numel() * b.element_size() for b in self._buffers())

    def _buffers(self) -> list[Tensor]:
        return [b for b in (*self._keys, *self._values) if b is not None]

    def _make_room(self, layer: int, like: Tensor, end: int) -> None:
        keys = self._keys[layer]
        capacity = 0 if keys is None else keys.shape[2]
        if end <= capacity and not self._shared[layer]:
            return
        if end > capacity:
            # Half as much again: growing token by token copies each position a bounded number of times.
            wanted = max(end, capacity + capacity // 2)
            capacity = -(-wanted // _BLOCK) * _BLOCK
        for buffers in (self._keys, self._values):
            old = buffers[layer]
            new = torch.empty((*like.shape[:2], capacity, like.shape[3]), dtype=like.dtype, device=like.device)
            if old is not None:
                new[:, :, : self.length] = old[:, :, : self.length]
            buffers[layer] = new
        self._shared[layer] = False
