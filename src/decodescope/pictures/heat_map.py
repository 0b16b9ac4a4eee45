"""One matrix with its tokens along both sides."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodescope.pictures.canvas import make_picture
from decodescope.pictures.colours import FAINT, colour_bar, show_values, writing_on
from decodescope.pictures.content import Matrix, Texts
from decodescope.pictures.labels import cut, thinned, widest
from decodescope.pictures.page import Box, inch_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_LARGEST_SIDE, _SMALLEST_SIDE, _LARGEST_CELL, _BAR_HEIGHT = 8.0, 0.32, 0.42, 1.6
_CHARACTER, _LINE = 0.065, 0.2  # of a cell's text
_ASKEW_FROM = 0.24  # distance of column labels; closer ones stand upright
_MOST_CELL_ROWS, _MOST_CELL_COLUMNS, _WIDEST_CELL = 100, 40, 12


def draw_heat_map(path: Path, matrix: Matrix, texts: Texts) -> tuple[str, ...]:
    """Draw one matrix into a .png or .svg file, row 0 on top, with labels, title and colour bar.

    Cell texts are left out of a matrix too large for them, labels are thinned and cut, and where there are more
    cells than dots the largest of neighbours is shown. Returns the characters that no installed font draws.
    Raises InputError, and ValueError for a matrix without values.
    """
    if not matrix.values.size:
        raise ValueError("no values to draw")
    labels = [label for side in (matrix.rows, matrix.columns) for _, label in thinned(side)]
    written = [texts.title, texts.x, texts.y, texts.scale, *labels, *chain(*_cells(matrix))]
    return make_picture(path, written, lambda figure: _paint(figure, matrix, texts))


def _paint(figure: "Figure", matrix: Matrix, texts: Texts) -> None:
    cells = _cells(matrix)
    width, height = _size(matrix, cells)
    axes = inch_axes(figure, width, height)
    show_values(axes, matrix.values, Box(0, 0, width, height))
    across, down = width / len(matrix.columns), height / len(matrix.rows)
    for row, line in enumerate(cells):
        for column, text in enumerate(line):
            place = ((column + 0.5) * across, (row + 0.5) * down)
            colour = writing_on(float(matrix.values[row, column]))
            axes.text(*place, text, size=7.5, color=colour, ha="center", va="center")
    _label_rows(axes, matrix.rows, down)
    _label_columns(axes, matrix.columns, across)
    axes.set_xlabel(texts.x, size=9)
    axes.set_ylabel(texts.y, size=9)
    axes.set_title(texts.title, loc="left", size=11, pad=10)
    colour_bar(figure, max(height, _BAR_HEIGHT), texts.scale)


def _cells(matrix: Matrix) -> list[list[str]]:
    """The cell texts, cut to fit; none where there are too many cells."""
    if len(matrix.rows) > _MOST_CELL_ROWS or len(matrix.columns) > _MOST_CELL_COLUMNS:
        return []
    return [[cut(text, _WIDEST_CELL) for text in line] for line in matrix.cells]


def _size(matrix: Matrix, cells: list[list[str]]) -> tuple[float, float]:
    """Width and height in inches: cells as large as their text asks, else square ones while they fit."""
    rows, columns = len(matrix.rows), len(matrix.columns)
    if cells:
        return columns * (_CHARACTER * widest([*chain(*cells), "0000"]) + 0.12), rows * _LINE
    cell = min(_LARGEST_CELL, _LARGEST_SIDE / max(rows, columns))
    return max(columns * cell, _SMALLEST_SIDE), max(rows * cell, _SMALLEST_SIDE)


def _label_rows(axes: "Axes", labels: Sequence[str], pitch: float) -> None:
    shown = dict(thinned(labels))
    axes.set_yticks([(row + 0.5) * pitch for row in shown], list(shown.values()))
    axes.tick_params(labelsize=8, length=2, color=FAINT)


def _label_columns(axes: "Axes", labels: Sequence[str], pitch: float) -> None:
    """Labels that lie flat if all fit side by side, else stand askew or, close together, upright."""
    shown = dict(thinned(labels))
    if _CHARACTER * 1.15 * widest(list(shown.values())) < pitch:
        turn: dict[str, Any] = {}
    elif pitch > _ASKEW_FROM:
        turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    else:
        turn = {"rotation": 90}
    axes.set_xticks([(column + 0.5) * pitch for column in shown], list(shown.values()), **turn)
