"""How a vocabulary spells bytes: the byte-level alphabet of GPT-2, and SentencePiece's `▁` and `<0xE6>`."""

import re
from collections.abc import Callable

Spelling = Callable[[str], bytes]  # a vocabulary entry -> the bytes it stands for

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level(entry: str) -> bytes:
    """The bytes of a byte-level entry; one that uses other letters stands for its own UTF-8."""
    try:
        return bytes([BYTE_ALPHABET[letter] for letter in entry])
    except KeyError:
        return entry.encode()


def sentencepiece(entry: str) -> bytes:
    """The bytes of a SentencePiece entry: `<0xE6>` is one byte, `▁` is a space."""
    single = _BYTE_TOKEN.fullmatch(entry)
    return bytes([int(single[1], 16)]) if single else entry.replace("▁", " ").encode()


def is_partial(raw: bytes) -> bool:
    """Whether the bytes begin, end or lie inside an unfinished character."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return False
