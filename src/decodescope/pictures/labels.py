"""Labels that must share little room: cut where too long, thinned where too many."""

from collections.abc import Iterator, Sequence
from unicodedata import east_asian_width

MOST_LABELS = 64
WIDEST_LABEL = 18


def width(text: str) -> int:
    """Columns that a text takes, a Chinese character two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def cut(text: str, widest: int = WIDEST_LABEL) -> str:
    """The text, or its beginning and an ellipsis in at most `widest` columns."""
    if width(text) <= widest:
        return text
    while width(text) > widest - 1:
        text = text[:-1]
    return text + "…"


def widest(texts: Sequence[str]) -> int:
    """Columns of the widest text; 0 for none."""
    return max(map(width, texts), default=0)


def thinned(labels: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(index, label cut short) of every label, or of evenly spaced ones where there are more than fit."""
    stride = -(-len(labels) // MOST_LABELS) or 1
    return ((index, cut(labels[index])) for index in range(0, len(labels), stride))
