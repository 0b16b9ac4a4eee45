"""Lines: seconds by length, entropy by layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decodescope.pictures.canvas import make_picture
from decodescope.pictures.colours import FAINT, PALETTE
from decodescope.pictures.content import Curve, Texts
from decodescope.pictures.labels import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv<>"
_MOST_MARKED = 64  # points; more would hide the line
_INCHES = (6.4, 3.8)
_GAP = 0.6  # between charts, inches: room for a title and an axis


def draw_curves(path: Path, lines: Sequence[Curve], texts: Texts) -> tuple[str, ...]:
    """Draw lines into a .png or .svg file, both axes linear, y from zero where nothing is negative.

    Returns the characters that no installed font draws. Raises InputError, and ValueError where there is
    no line.
    """
    return draw_stacked(path, [(lines, texts)])


def draw_stacked(path: Path, charts: Sequence[tuple[Sequence[Curve], Texts]]) -> tuple[str, ...]:
    """Draw charts below one another, the same lines in each of them: the legend of the first serves all.

    Otherwise as `draw_curves`.
    """
    if not charts or not all(lines for lines, _ in charts):
        raise ValueError("no line to draw")
    written = [text for lines, texts in charts for text in _written(lines, texts)]
    return make_picture(path, written, lambda figure: _paint(figure, charts))


def _written(lines: Sequence[Curve], texts: Texts) -> list[str]:
    return [texts.title, texts.x, texts.y, *(line.label for line in lines)]


def _paint(figure: "Figure", charts: Sequence[tuple[Sequence[Curve], Texts]]) -> None:
    width, height = _INCHES
    whole = height + (height + _GAP) * (len(charts) - 1)
    figure.set_size_inches(width, whole)
    for number, (lines, texts) in enumerate(charts, 1):
        bottom = whole - number * height - (number - 1) * _GAP
        _plot(figure.add_axes((0, bottom / whole, 1, height / whole)), lines, texts)
    _legend(figure.axes[0], [cut(line.label, 40) for line in charts[0][0]])


def _plot(axes: "Axes", lines: Sequence[Curve], texts: Texts) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, line in enumerate(lines):
        marker = _MARKERS[number % len(_MARKERS)] if len(line.x) <= _MOST_MARKED else ""
        colour = PALETTE[number % len(PALETTE)]
        axes.plot(line.x, line.y, marker=marker, color=colour, markersize=4.5, linewidth=1.6, clip_on=False)
    if not any(np.any(line.y < 0) for line in lines):
        axes.set_ylim(bottom=0)
    whole = all(np.all(line.x == np.round(line.x)) for line in lines)  # layers and tokens have no halves
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(style="plain", axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8, length=3, color=FAINT)
    axes.set_xlabel(texts.x, size=9)
    axes.set_ylabel(texts.y, size=9)
    axes.set_title(texts.title, loc="left", size=11, pad=10)


def _legend(axes: "Axes", labels: list[str]) -> None:
    """Names beside the lines' colours; put in afterwards, as a legend leaves out names that begin with _."""
    places = ["line"] * len(labels)
    legend = axes.legend(axes.lines, places, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=8)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)
