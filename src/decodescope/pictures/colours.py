"""The colours of every picture: one scale from 0 to 1, and a palette for groups and lines."""

from typing import TYPE_CHECKING

import numpy as np

from decodescope.pictures.content import Floats
from decodescope.pictures.page import DOTS_PER_INCH, Box

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

INK, FAINT, BLANK = "#1f2328", "#6a737d", "#ededed"
# Okabe and Ito's palette for all kinds of colour vision; purple for its yellow, which is lost on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a3e9d", "#000000")
_TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
_LIGHT_FROM = 0.25  # from here on dark writing has more contrast than white


def _scale() -> "tuple[Normalize, Colormap]":
    """Viridis over 0..1 by the square root, so that a small share can be told from none; NaN is pale grey."""
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=1, clip=True), colormaps["viridis"].with_extremes(bad=BLANK)


def show_values(axes: "Axes", values: Floats, box: Box) -> None:
    """Colour `values` [R, C] into a box, row 0 on top."""
    norm, shades = _scale()
    edges = (box.left, box.left + box.width, box.top + box.height, box.top)
    dots = (round(box.height * DOTS_PER_INCH), round(box.width * DOTS_PER_INCH))
    axes.imshow(
        thinned_values(values, dots), norm=norm, cmap=shades, aspect="auto", interpolation="none", extent=edges
    )


def thinned_values(values: Floats, most: tuple[int, int]) -> Floats:
    """At most `most` rows and columns, each value the largest of those it stands for; NaN where all are.

    The largest and not the mean, as a single token looked at among thousands must stay visible.
    """
    for axis, room in enumerate(most):
        length = values.shape[axis]
        starts = np.linspace(0, length, min(length, room), endpoint=False).astype(int)
        values = np.fmax.reduceat(values, starts, axis=axis)
    return values


def colour_bar(figure: "Figure", height: float, label: str) -> None:
    """Draw the scale, `height` inches high, to the right of a figure's lower end."""
    from matplotlib.cm import ScalarMappable

    width, whole = figure.get_size_inches()
    axes = figure.add_axes((1 + 0.2 / width, 1 - height / whole, 0.12 / width, height / whole))
    bar = figure.colorbar(ScalarMappable(*_scale()), cax=axes, ticks=_TICKS)
    bar.ax.set_yticklabels([f"{tick:g}" for tick in _TICKS])
    bar.ax.tick_params(length=2, labelsize=7, colors=FAINT)
    bar.outline.set_visible(False)
    bar.set_label(label, size=8, color=INK)


def writing_on(value: float) -> str:
    """The colour that can be read on the colour of `value`."""
    return INK if not value < _LIGHT_FROM else "white"


def group_colours(groups: list[str]) -> dict[str, str]:
    """A colour for each name, by order of appearance; the same grey for all where there are too many."""
    distinct = dict.fromkeys(groups, FAINT)
    return dict(zip(distinct, PALETTE, strict=False)) if len(distinct) <= len(PALETTE) else distinct
