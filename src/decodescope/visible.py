"""Text from models and files made fit for a terminal or a page; no library needed."""

import unicodedata

_PICTURES = {"\n": "↵", "\t": "⇥"}


def visible(text: str, keep_newlines: bool = False) -> str:
    """Text that commands no terminal and no page: control, bidi and invisible characters get a visible form."""
    return "".join(c if keep_newlines and c == "\n" else _visible(c) for c in text)


def _visible(character: str) -> str:
    if character in _PICTURES:
        return _PICTURES[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    joiner = code == 0x200D  # between emoji it is part of the picture
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and not joiner:
        return f"⟨U+{code:04X}⟩"
    return character


def token_text(text: str) -> str:
    """A token for display: leading and trailing spaces made visible, an empty one named."""
    shown = visible(text)
    stripped = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    after = len(shown) - len(shown.rstrip(" ")) if stripped else 0
    return "␣" * before + stripped + "␣" * after if shown else "∅"
