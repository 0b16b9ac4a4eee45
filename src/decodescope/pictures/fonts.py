"""Which installed fonts draw the characters of a picture, and which characters none of them draws."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from matplotlib.font_manager import FontEntry

FIRST = "DejaVu Sans"  # comes with matplotlib, so that Latin text looks alike everywhere
# Sans-serif families with simplified Chinese, the open ones first; a viewer of an SVG may have any of them.
CHINESE = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "SimHei",
    "Droid Sans Fallback",
    "Arial Unicode MS",
)
_BOXES = "Last Resort"  # claims every character and draws boxes


def families_for(texts: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """The font families to draw `texts` with, in order of preference, and the characters none can draw."""
    lacking = {character for text in texts for character in text if _has_ink(character)}
    families = []
    for entry in _installed():
        if entry.name == FIRST or drawn_by(entry, lacking):
            lacking -= drawn_by(entry, lacking)
            families.append(entry.name)
        if not lacking:
            break
    return families, tuple(sorted(lacking))


def _has_ink(character: str) -> bool:
    """False for spaces, joiners and variation selectors: a font may lack them without loss."""
    return not (character.isspace() or category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f")


def _installed() -> Iterator["FontEntry"]:
    """One upright regular face of each family: the first, Chinese ones, the rest; then fonts new to matplotlib."""
    from matplotlib.font_manager import fontManager

    ranks = {name: rank for rank, name in enumerate((FIRST, *CHINESE))}
    known = _regular(fontManager.ttflist)
    yield from sorted(known.values(), key=lambda entry: (ranks.get(entry.name, len(ranks)), entry.name))
    yield from _newly_installed()


def _regular(entries: Iterable["FontEntry"]) -> dict[str, "FontEntry"]:
    regular: dict[str, FontEntry] = {}
    for entry in entries:
        plain = (entry.style, entry.stretch) == ("normal", "normal") and entry.weight in (400, "normal")
        if plain and not entry.name.startswith(_BOXES):
            regular.setdefault(entry.name, entry)
    return regular


def _newly_installed() -> Iterator["FontEntry"]:
    """Fonts that came after matplotlib last made its list, which it keeps until it is updated itself."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {os.path.realpath(entry.fname) for entry in fontManager.ttflist}
    count = len(fontManager.ttflist)
    for path in sorted(findSystemFonts()):
        if os.path.realpath(path) not in known:
            with suppress(Exception):  # whatever a broken font file raises: the picture does not depend on it
                fontManager.addfont(path)
    yield from _regular(fontManager.ttflist[count:]).values()


def drawn_by(entry: "FontEntry", characters: Iterable[str]) -> set[str]:
    """Those of `characters` that a font has a glyph for; none where its file has gone or is broken."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(entry.fname, face_index=entry.index)
    except (OSError, RuntimeError):
        return set()
    return {character for character in characters if font.get_char_index(ord(character))}
