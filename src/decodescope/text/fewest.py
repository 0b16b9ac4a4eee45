"""How few tokens a text can come to, told from the vocabulary alone: to tokenise megabytes takes seconds."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from decodescope.text.blueprint import parts
from decodescope.text.spelling import BYTE_ALPHABET, Spelling, byte_level

_SHRINKS = 4  # times at most, by NFC: U+1FBE U+0308 U+0301 are 7 bytes of UTF-8 and become the 2 of U+0390
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Sequence", "Split")  # pre-tokenisers that need not drop anything
_NO_WORD = bytes(byte for byte in range(256) if not (byte < 128 and chr(byte).isalnum()))


@dataclass(frozen=True, slots=True)
class Longest:
    """The most that one token covers: bytes of UTF-8, and how many of ASCII's letters and digits."""

    utf8_bytes: int
    word_bytes: int
    composed: bool  # a text with more than ASCII is brought into NFC first
    unspelled: bytes  # bytes that the vocabulary lacks, and leaves out

    def fewest(self, text: str) -> int:
        """How many tokens a text has at least."""
        raw = text.encode("utf-8", "surrogatepass").translate(None, self.unspelled)
        if self.composed and not text.isascii():
            return 0 if self.unspelled else _least(len(raw), self.utf8_bytes * _SHRINKS)
        return max(_least(len(raw), self.utf8_bytes), _least(len(_words(raw)), self.word_bytes))


def longest(backend: Backend, spelling: Spelling) -> Longest | None:
    """What a token of this vocabulary covers at most; None where its rules may leave out some of a text."""
    added = list(backend.get_added_tokens_decoder().values())
    normalizers, unspelled = list(parts(backend.normalizer)), _unspelled(backend, spelling)
    if unspelled is None or not (
        all(map(_only_adds, normalizers))
        and all(map(_keeps, parts(backend.pre_tokenizer)))
        and not any(token.lstrip or token.rstrip for token in added)  # these take the spaces around them along
    ):
        return None
    # A `▁` may be a space, or the three bytes that it is itself.
    size: Callable[[str], bytes] = spelling if spelling is byte_level else str.encode
    covered = [*map(size, backend.get_vocab()), *_matched(backend, added)]
    most = max(map(len, covered)), max(len(_words(each)) for each in covered)
    return Longest(*most, any(part["type"] == "NFC" for part in normalizers), unspelled)


def _matched(backend: Backend, added: Iterable[AddedToken]) -> Iterator[bytes]:
    """What is looked for in a text as a whole."""
    for token in added:
        yield token.content.encode()
        if token.normalized and backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token.content).encode()


def _unspelled(backend: Backend, spelling: Spelling) -> bytes | None:
    """The bytes that have no entry and are dropped; None where that cannot be told or many may be one token."""
    model = backend.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if spelling is not byte_level:
        names = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else []
        return b"" if names and all(backend.token_to_id(name) is not None for name in names) else None
    if model.unk_token or not any(part["type"] == "ByteLevel" for part in parts(backend.pre_tokenizer)):
        return None
    return bytes(byte for letter, byte in BYTE_ALPHABET.items() if backend.token_to_id(letter) is None)


def _only_adds(part: dict[str, Any]) -> bool:
    """Whether a part of a normaliser leaves a text no shorter; NFC is reckoned with."""
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"])
    return part["type"] in ("NFC", "Prepend", "Sequence")


def _keeps(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEPING and part.get("behavior") != "Removed"


def _words(raw: bytes) -> bytes:
    return raw.translate(None, _NO_WORD)


def _least(amount: int, most: int) -> int:
    """How many of at most `most` make up an amount."""
    return -(-amount // max(most, 1))
