"""Prefixes: caches of ended requests, kept so that what a later prompt begins with is not computed again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from decodescope.generate import NOTHING, Past
from decodescope.model.kv_cache import KVCache

_LEAST = 8  # tokens in common that are worth a copy: every chat template begins alike
_MOST = 1024  # sequences: each is compared with every prompt
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The cache of a sequence with the ids that it holds, and its memory in bytes."""

    ids: Ids
    cache: KVCache
    nbytes: int

    @classmethod
    def of(cls, past: Past) -> Self:
        """What a sequence has come to."""
        assert past.cache is not None
        return cls(np.array(past.ids, dtype=np.int64), past.cache, past.cache.allocated_bytes)

    def common(self, ids: Ids) -> int:
        """How many of its ids others begin with."""
        both = min(len(self.ids), len(ids))
        apart = np.flatnonzero(self.ids[:both] != ids[:both])
        return int(apart[0]) if len(apart) else both


class Prefixes:
    """Kept caches, the least recently used first; `kept_bytes` is what they take."""

    def __init__(self) -> None:
        self._kept: list[Held] = []
        self.kept_bytes = 0

    def keep(self, past: Past) -> None:
        """Keep what an ended request leaves behind, its memory included; what is a beginning of it goes.

        Raises MemoryError where it cannot be cut to its size; then nothing is kept.
        """
        if past.cache is None or past.cache.length < _LEAST:
            return
        past.cache.shrink()
        new = Held.of(past)
        for held in [held for held in self._kept if held.common(new.ids) == len(held.ids)]:
            self._drop(held)
        self._kept.append(new)
        self.kept_bytes += new.nbytes
        if len(self._kept) > _MOST:
            self._drop(self._kept[0])

    def shrink_to(self, most_bytes: int, spared: Held | None = None) -> None:
        """Let go of the least recently used, never of `spared`, until the rest takes no more than this."""
        for held in [held for held in self._kept if held is not spared]:
            if self.kept_bytes <= most_bytes:
                return
            self._drop(held)

    def past_of(self, ids: Sequence[int], running: Iterable[Held], most: int, room_bytes: int) -> Past:
        """What of a prompt is known, as a cache of its own for at most `most` positions; NOTHING where little is.

        `running` are sequences still being decoded: what two have in common is theirs as well. Afterwards no more
        than `room_bytes` is kept: a cache is copied where there is room for both, else handed over.
        """
        wanted = np.array(ids[:-1], dtype=np.int64)  # the logits behind the last token are to be computed
        lengths = [(held.common(wanted), held) for held in (*self._kept, *running)]
        common, found = max(lengths, key=lambda pair: pair[0], default=(0, None))
        if found is None or common < _LEAST:
            self.shrink_to(room_bytes)
            return NOTHING
        self.shrink_to(room_bytes, spared=found)
        return Past((), tuple(ids[:common]), self._taken(found, common, most, room_bytes))

    def _taken(self, found: Held, common: int, most: int, room_bytes: int) -> KVCache:
        if found not in self._kept:
            return found.cache.copy(common, most)
        self._drop(found)
        if self.kept_bytes + found.nbytes <= room_bytes:
            self._kept.append(found)  # used last
            self.kept_bytes += found.nbytes
            return found.cache.copy(common, most)
        found.cache.truncate(common)
        found.cache.shrink(most)
        return found.cache

    def _drop(self, held: Held) -> None:
        self._kept.remove(held)
        self.kept_bytes -= held.nbytes
