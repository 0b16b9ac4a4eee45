"""Horizontal bars: measured rates, how far they spread, and the limit they are held against."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.pictures.canvas import make_picture
from decodescope.pictures.colours import FAINT, INK, PALETTE
from decodescope.pictures.content import Bar, Texts
from decodescope.pictures.labels import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW, _AROUND = 6.4, 0.24, 0.9  # inches: a chart, one of its bars, and its title and axis
_LONGEST = 48  # characters of a label


def draw_bars(path: Path, charts: Sequence[tuple[Sequence[Bar], Texts]]) -> tuple[str, ...]:
    """Draw charts of bars below one another into a .png or .svg file, each from zero; `scale` names the limit.

    Returns the characters that no installed font draws. Raises InputError, and ValueError where there is no bar.
    """
    if not charts or not all(bars for bars, _ in charts):
        raise ValueError("no bar to draw")
    written = [text for bars, texts in charts for text in (texts.title, texts.x, texts.scale, *_labels(bars))]
    return make_picture(path, written, lambda figure: _paint(figure, charts))


def _labels(bars: Sequence[Bar]) -> list[str]:
    return [cut(bar.label, _LONGEST) for bar in bars]


def _paint(figure: "Figure", charts: Sequence[tuple[Sequence[Bar], Texts]]) -> None:
    heights = [_ROW * len(bars) for bars, _ in charts]
    whole = sum(heights) + _AROUND * (len(charts) - 1)
    figure.set_size_inches(_WIDTH, whole)
    ends = accumulate(height + _AROUND for height in heights)
    for (bars, texts), height, end in zip(charts, heights, ends, strict=True):
        bottom = whole - (end - _AROUND)
        _plot(figure.add_axes((0, bottom / whole, 1, height / whole)), bars, texts)


def _plot(axes: "Axes", bars: Sequence[Bar], texts: Texts) -> None:
    places = range(len(bars))
    values = [bar.value for bar in bars]
    spread = [[bar.value - bar.least for bar in bars], [bar.most - bar.value for bar in bars]]
    axes.barh(
        places, values, height=0.62, color=PALETTE[0], xerr=spread, error_kw={"ecolor": INK, "elinewidth": 0.8}
    )
    marked = [(place, bar.limit) for place, bar in zip(places, bars, strict=True) if bar.limit is not None]
    if marked:
        rows, limits = zip(*marked, strict=True)
        axes.plot(limits, rows, "|", color=PALETTE[1], markersize=10, markeredgewidth=1.6, clip_on=False)
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            f"{bar.value:.1f}", (bar.most, place), (4, 0), textcoords="offset points", va="center", size=7
        )
    axes.set_yticks(places, _labels(bars))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8, length=3, color=FAINT)
    axes.set_xlabel(texts.x if not texts.scale or not marked else f"{texts.x}   |  {texts.scale}", size=9)
    axes.set_title(texts.title, loc="left", size=11, pad=10)
