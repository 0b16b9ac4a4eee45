"""Heat maps of shaded cells: coloured where there are colours enough, else made of characters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, sqrt

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from decodescope.cli.console import line, out

# Viridis, as in the pictures; like there, colour and shade go by the square root of a weight from 0 to 1.
_COLOURS = (
    "#440154", "#481a6c", "#472f7d", "#414487", "#39568c", "#31688e", "#2a788e", "#23888e",
    "#1f988b", "#22a884", "#35b779", "#54c568", "#7ad151", "#a5db36", "#d2e21b", "#fde725",
)  # fmt: skip
_WIDEST_LABEL = 18
_SHADES = "·░▒▓█"
_SHADES_FROM = (0.0, 0.01, 0.06, 0.25, 0.55)
_TALLEST = 10  # characters of a token that stands upright
_WIDE, _NARROW = 2, 1  # columns of the terminal a cell takes; a Chinese character takes two
_RULED = 5


@dataclass(frozen=True, slots=True)
class Shaded:
    """Rows of weights, NaN where nothing is to be seen, with a label before each and a text above each column.

    `numbers` are written along the upper edge.
    """

    labels: Sequence[Text]
    columns: Sequence[str]
    numbers: Sequence[int]
    rows: Sequence[Sequence[float]]


def room_for_cells(width: int) -> int:
    """How many cells fit beside the labels into `width` columns, at their narrowest."""
    return (width - _WIDEST_LABEL) // _NARROW


def shaded_lines(shaded: Shaded, width: int) -> Iterator[Text]:
    """The lines of a heat map in `width` columns, tokens upright above it where cells can be wide enough."""
    margin = min(max(label.cell_len for label in shaded.labels) + 1, _WIDEST_LABEL)
    wide = margin + _WIDE * len(shaded.columns) <= width
    cell = _WIDE if wide else _NARROW
    for text in (*(_upright(shaded.columns) if wide else ()), _ruler(shaded.numbers, cell)):
        yield line(" " * margin, (text.rstrip(), "dim"))
    for label, values in zip(shaded.labels, shaded.rows, strict=True):
        row = label.copy()
        row.truncate(margin - 1, overflow="ellipsis")
        row.pad_right(margin - row.cell_len)
        for value in values:
            row.append(*_cell(value, cell))
        yield row


def scale_line() -> Text:
    """What colours and shades stand for."""
    bounds = zip(_SHADES_FROM, (*_SHADES_FROM[1:], 1.0), strict=True)
    parts = line()
    for low, high in bounds:
        parts.append(*_cell((low + high) / 2, _WIDE)).append(f" {low:g}–{high:g}   ", "dim")
    return parts


def _cell(value: float, cells: int) -> tuple[str, str]:
    if isnan(value):
        return " " * cells, ""
    if _coloured():
        colour = _COLOURS[round(sqrt(min(max(value, 0.0), 1.0)) * (len(_COLOURS) - 1))]
        return " " * cells, f"on {colour}"
    shade = max(level for level, low in enumerate(_SHADES_FROM) if value >= low or not level)
    return _SHADES[shade] * cells, ""


def _coloured() -> bool:
    return out().color_system in ("256", "truecolor") and not out().no_color


def _upright(texts: Sequence[str]) -> Iterator[str]:
    """The texts standing side by side, each reading downwards and ending at the bottom."""
    stacks = [_stack(text) for text in texts]
    height = max(map(len, stacks))
    for level in range(height):
        yield "".join(_at(stack, level - height + len(stack)) for stack in stacks)


def _stack(text: str) -> list[str]:
    """The characters of a text, those without width of their own left out."""
    characters = [character for character in text if cell_len(character)]
    return characters if len(characters) <= _TALLEST else [*characters[: _TALLEST - 1], "⋮"]


def _at(stack: list[str], level: int) -> str:
    return set_cell_size(stack[level], _WIDE) if level >= 0 else " " * _WIDE


def _ruler(numbers: Sequence[int], cell: int) -> str:
    """Every few columns the number of one."""
    every = _RULED if cell == _WIDE else 2 * _RULED
    return "".join(set_cell_size(str(number), every * cell) for number in numbers[::every])
