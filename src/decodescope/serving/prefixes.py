"""Prefixes: caches of ended requests, kept so that what a later prompt begins with is not computed again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decodescope.generate import NOTHING, Past
from decodescope.model.kv_cache import KVCache
from decodescope.sequences import common_length

_LEAST = 8  # tokens in common that are worth a copy: every chat template begins alike


@dataclass(frozen=True, slots=True)
class Held:
    """The cache of a sequence with the ids that it holds."""

    ids: Sequence[int]
    cache: KVCache


class Prefixes:
    """Kept caches, the least recently used first; `kept_bytes` is what they take."""

    def __init__(self) -> None:
        self._kept: list[Held] = []

    @property
    def kept_bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(held.cache.allocated_bytes for held in self._kept)

    def keep(self, past: Past) -> None:
        """Keep what an ended request leaves behind; what is a beginning of it need not stay."""
        if past.cache is None or past.cache.length < _LEAST:
            return
        self._kept = [held for held in self._kept if common_length(held.ids, past.ids) < len(held.ids)]
        self._kept.append(Held(past.ids, past.cache.copy(past.cache.length)))

    def shrink_to(self, most_bytes: int) -> None:
        """Let go of the least recently used until the rest takes no more than this."""
        while self._kept and self.kept_bytes > most_bytes:
            del self._kept[0]

    def past_of(self, ids: Sequence[int], running: Iterable[Held], most: int) -> Past:
        """What of a prompt is known, as a cache of its own for at most `most` positions; NOTHING where little is.

        `running` are sequences still being decoded: what two have in common is theirs as well.
        """
        wanted = ids[:-1]  # the logits behind the last token are to be computed
        found = max((*self._kept, *running), key=lambda held: common_length(held.ids, wanted), default=None)
        common = 0 if found is None else common_length(found.ids, wanted)
        if found is None or common < _LEAST:
            return NOTHING
        if found in self._kept:
            self._kept.remove(found)
            self._kept.append(found)
        return Past((), tuple(ids[:common]), found.cache.copy(common, most))
