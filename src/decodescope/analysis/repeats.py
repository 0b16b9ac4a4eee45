"""Going round in circles: the longest repeated suffix, and when a repetition is a loop.

A loop is endless and a repetition in good text is not, so a loop may be told late but must not be told wrongly.
What stands twice is common (a program shown again whole, the refrain of a song), what stands three times in a row
word for word is rare, and short where it is honest (rows of a table, zeros, rules). Hence three conditions, each
of which asks for a third copy and for `least` repeated tokens:

exact     the tail is one block of tokens again and again;
numbered  it is, once the numbers that lines begin with are left out: a list of the same items that counts up.
          There must be words in it, and numbers elsewhere count as text: in "7 x 8 = 56" they are what is said;
ngrams    the newest tokens all complete 4-grams that have stood twice before, but for the three that are new where
          two such pieces meet: a few sentences in changing order. A changed token makes four new, so code whose
          lines differ in one place is none, unless more than `least` tokens lie between two of these places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from decodescope.sequences import common_length

LOOP_TOKENS = 32  # that repeat, at least
_COPIES = 3
_GRAM = 4
_SEAM = _GRAM - 1
_ROOM = 256  # tokens to begin with; doubled when full


@dataclass(frozen=True, slots=True)
class Loop:
    """The tail of a text goes round: from token `start` on, `repeats` whole blocks of `period` tokens.

    `repeated_tokens` have stood before, and `needed_tokens` are what makes it a loop. Of `ngrams`, `start` is
    where the part that was looked at begins; the newest 4-gram came `repeats` times, last `period` tokens earlier.
    """

    start: int
    period: int
    repeats: int
    kind: Literal["exact", "numbered", "ngrams"]
    repeated_tokens: int
    needed_tokens: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """The tail is a block of `period` tokens again and again; `repeated` of its tokens stood there before."""

    period: int
    repeated: int
    needed: int

    @property
    def blocks(self) -> int:
        """How many whole blocks there are."""
        return self.repeated // self.period + 1


class RepeatedSuffix:
    """The longest run of newest tokens that has stood before, kept as tokens come.

    `_runs[p - 1]` says how many of the newest tokens in a row equal the token p places earlier. A new token ends
    the runs of all p whose token differs and lengthens the others: one pass over p, no search.
    """

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int64] = np.zeros(_ROOM, np.int64)
        self._runs: npt.NDArray[np.int64] = np.zeros(_ROOM, np.int64)
        self._count = 0

    def push(self, token_id: int) -> None:
        """Take the next token; O(tokens so far)."""
        count = self._count
        if count == len(self._ids):
            self._ids, self._runs = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._runs))
        runs = self._runs[:count]
        runs += 1
        runs *= self._ids[:count][::-1] == token_id
        self._ids[count] = token_id
        self._count += 1

    def forget_from(self, length: int) -> None:
        """Be as after the first `length` tokens; they are counted again."""
        kept = self._ids[: min(length, self._count)].tolist()
        self._runs[:] = 0
        self._count = 0
        for token_id in kept:
            self.push(token_id)

    @property
    def length(self) -> int:
        """How many of the newest tokens stood `lag` tokens earlier too: the most there are; they may overlap."""
        return int(self._runs[: self._count].max(initial=0))

    @property
    def lag(self) -> int:
        """How many tokens earlier (the nearest of equals); 0 where `length` is 0."""
        return int(self._runs[: self._count].argmax()) + 1 if self.length else 0

    def cycle(self, least: int) -> Cycle | None:
        """The shortest block that the tail consists of, three times or more, `least` tokens repeating; or None."""
        if self.length < least:
            return None
        runs = self._runs[: self._count]
        needed = np.maximum(least, (_COPIES - 1) * np.arange(1, self._count + 1))
        periods = np.flatnonzero(runs >= needed) + 1
        if not len(periods):
            return None
        period = int(periods[0])
        return Cycle(period, int(runs[period - 1]), int(needed[period - 1]))


class LoopFinder:
    """Watches for a loop as tokens come; O(tokens so far) for each.

    `least` is the number of tokens that must repeat. A token's text tells the numbers that lines begin with;
    without texts no list is recognised.
    """

    def __init__(self, least: int = LOOP_TOKENS) -> None:
        self.least = least
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._exact = RepeatedSuffix()
        # Without the numbers that lines begin with: the tokens at `_places`.
        self._unnumbered = RepeatedSuffix()
        self._places: list[int] = []
        self._in_number = False  # the newest token belongs to such a number
        self._stood: dict[tuple[int, ...], tuple[int, int]] = {}  # 4-gram -> how often it stood, and where last
        self._before: list[tuple[int, int]] = []  # how often a token's 4-gram stood before, and how far back last

    def push(self, token_id: int, text: str = "") -> None:
        """Take the next token and its text."""
        self._in_number = text.strip().isdecimal() and (self._in_number or _begins_line(self._texts))
        self._ids.append(token_id)
        self._texts.append(text)
        self._exact.push(token_id)
        if not self._in_number:
            self._unnumbered.push(token_id)
            self._places.append(len(self._ids) - 1)
        self._remember(tuple(self._ids[-_GRAM:]))

    def forget_from(self, length: int) -> None:
        """Be as after the first `length` tokens; they are taken again."""
        ids, texts = self._ids[:length], self._texts[:length]
        self._clear()
        self.follow(ids, texts)

    def follow(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        """Be as after these tokens and texts: forget from the first id that differs on, and take the rest."""
        known = common_length(self._ids, ids)
        if known < len(self._ids):
            self.forget_from(known)
        for token_id, text in zip(ids[known:], texts[known:], strict=True):
            self.push(token_id, text)

    @property
    def repeated_tokens(self) -> int:
        """The length of the longest repeated suffix."""
        return self._exact.length

    @property
    def loop(self) -> Loop | None:
        """The loop that the newest token is part of."""
        return self._exact_loop() or self._numbered_loop() or self._ngram_loop()

    def _remember(self, gram: tuple[int, ...]) -> None:
        place = len(self._ids) - 1
        times, last = self._stood.get(gram, (0, 0))
        self._before.append((times, place - last))
        self._stood[gram] = (times + 1, place)

    def _exact_loop(self) -> Loop | None:
        cycle = self._exact.cycle(self.least)
        if cycle is None:
            return None
        start = len(self._ids) - cycle.repeated - cycle.period
        return Loop(start, cycle.period, cycle.blocks, "exact", cycle.repeated, cycle.needed)

    def _numbered_loop(self) -> Loop | None:
        cycle = self._unnumbered.cycle(self.least)
        if cycle is None or not self._has_word(self._places[-cycle.period :]):
            return None  # numbers alone are counting, not a list
        start = self._places[-cycle.repeated - cycle.period]
        period = self._places[-1] - self._places[-1 - cycle.period]
        return Loop(start, period, cycle.blocks, "numbered", cycle.repeated, cycle.needed)

    def _has_word(self, places: Sequence[int]) -> bool:
        return any(character.isalpha() for place in places for character in self._texts[place])

    def _ngram_loop(self) -> Loop | None:
        tail = self._before[-self.least - _SEAM :]
        known = [(times, back) for times, back in tail if times >= _COPIES - 1]
        if len(known) < self.least:
            return None
        times, back = known[-1]
        return Loop(len(self._ids) - len(tail), back, times + 1, "ngrams", len(known), self.least)


def _begins_line(before: Sequence[str]) -> bool:
    """Whether what follows these texts begins a line, indented or not."""
    return not before or before[-1].rstrip(" \t").endswith("\n")


def find_loop(ids: Sequence[int], texts: Sequence[str] = (), least: int = LOOP_TOKENS) -> Loop | None:
    """The loop that a finished text ends in: see `LoopFinder`. `texts` are those of the tokens, or none."""
    finder = LoopFinder(least)
    finder.follow(ids, texts or [""] * len(ids))
    return finder.loop
