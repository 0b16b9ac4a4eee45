"""A page measured in inches from its upper left corner, as matrices and panels are laid out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page, in inches."""

    left: float
    top: float
    width: float
    height: float


def inch_axes(figure: "Figure", width: float, height: float) -> "Axes":
    """Make the figure this large and fill it with bare axes whose units are inches, y downwards."""
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0, 0, 1, 1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.autoscale(False)
    return axes
