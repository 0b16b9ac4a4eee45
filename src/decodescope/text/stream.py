"""Printable text from tokens as they come: no half characters, and nothing beyond a stop string."""

import codecs
from collections.abc import Sequence

from decodescope.errors import InputError
from decodescope.text.tokenizer import Tokenizer


class TextStream:
    """Joined deltas equal `tokenizer.decode(ids, skip_special=True)` of the whole, for every cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.drops_first_space

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; an unfinished character is held back."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._trimmed(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; the stream is then as new."""
        rest = self._trimmed(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._at_start = self._tokenizer.drops_first_space
        return rest

    def _trimmed(self, text: str) -> str:
        """Without the one space that encoding puts in front of a whole text, where the vocabulary does so."""
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Lets text through up to the stop string that is complete first, wherever the text was cut.

    Of two that are complete at the same character, the longer one counts. `found` is that string, or None.
    Raises InputError for an empty stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise InputError("text.empty_stop_string")
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far unprinted that cannot belong to a stop string."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(place + len(s), place, s) for s in self._strings if (place := self._held.find(s)) >= 0]
        if hits:
            _, place, self.found = min(hits)
            return self._release(place)
        return self._release(len(self._held) - self._possible_start())

    def flush(self) -> str:
        """The text held back at the end of a stream that found no stop string."""
        return self._release(len(self._held)) if self.found is None else ""

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _possible_start(self) -> int:
        """How many of the last characters could be the beginning of a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self._strings)), 0)
