"""Many small matrices on one page: the heads of a layer, or all layers by all heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.pictures.canvas import make_picture
from decodescope.pictures.colours import FAINT, INK, colour_bar, group_colours, show_values
from decodescope.pictures.content import Panel, Row, Texts
from decodescope.pictures.labels import cut, widest
from decodescope.pictures.page import Box, inch_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_PAGE, _LARGEST_PANEL, _SMALLEST_PANEL, _FLATTEST = 14.0, 1.5, 0.45, 0.22
_CAPTION, _GROUP_LINE, _FRAME, _BAR_HEIGHT = 0.2, 0.24, 0.014, 2.4
_POINTS = 4.8  # of a character in a row's caption


@dataclass(frozen=True, slots=True)
class _Layout:
    """Sizes in inches. With `headed`, captions stand once above the columns, else above each panel."""

    panel: float
    height: float
    gap: float
    headed: bool

    @property
    def right(self) -> float:
        return self.panel + self.gap

    @property
    def down(self) -> float:
        return self.height + self.gap + (0 if self.headed else _CAPTION)


def draw_atlas(path: Path, rows: Sequence[Row], texts: Texts) -> tuple[str, ...]:
    """Draw rows of panels into a .png or .svg file, all in one colour scale, framed in their groups' colours.

    Captions that are the same in every row are written once, above the columns, with the groups over them;
    `texts.x` and `texts.y` say what columns and rows are. Returns the characters that no installed font draws.
    Raises InputError, and ValueError where there is no panel.
    """
    if not any(row.panels for row in rows):
        raise ValueError("no panel to draw")
    panels = [panel for row in rows for panel in row.panels]
    written = [texts.title, texts.x, texts.y, texts.scale, *(row.caption for row in rows)]
    written += [text for panel in panels for text in (panel.caption, panel.group)]
    return make_picture(path, written, lambda figure: _paint(figure, rows, texts))


def _paint(figure: "Figure", rows: Sequence[Row], texts: Texts) -> None:
    layout = _layout(rows)
    columns = max(len(row.panels) for row in rows)
    height = len(rows) * layout.down - layout.gap
    axes = inch_axes(figure, columns * layout.right - layout.gap, height)
    colours = group_colours([panel.group for row in rows for panel in row.panels])
    for number, row in enumerate(rows):
        _paint_row(axes, row, layout, number * layout.down, colours)
    head = _head(axes, rows[0].panels, layout, colours) if layout.headed else 0
    axes.set_ylabel(texts.y, size=9, labelpad=12 + _POINTS * widest([cut(row.caption) for row in rows]))
    axes.set_xlabel(texts.x, size=9)
    axes.text(0, -head - 0.16, texts.title, size=12, va="bottom", color=INK)
    colour_bar(figure, max(min(_BAR_HEIGHT, height), 1.2), texts.scale)


def _layout(rows: Sequence[Row]) -> _Layout:
    columns = max(len(row.panels) for row in rows)
    captions = [[panel.caption for panel in row.panels] for row in rows]
    headed = len(rows) > 1 and all(line == captions[0] for line in captions)
    panel = min(max(_PAGE / columns, _SMALLEST_PANEL), _LARGEST_PANEL)
    flatness = max(panel.values.shape[0] / panel.values.shape[1] for row in rows for panel in row.panels)
    gap = 0.06 + 0.06 * panel
    width = panel - gap
    return _Layout(width, width * min(max(flatness, _FLATTEST), 1), gap, headed)


def _paint_row(axes: "Axes", row: Row, layout: _Layout, top: float, colours: dict[str, str]) -> None:
    top += 0 if layout.headed else _CAPTION
    axes.text(-0.12, top + layout.height / 2, cut(row.caption), size=8, ha="right", va="center")
    for column, panel in enumerate(row.panels):
        box = Box(column * layout.right, top, layout.panel, layout.height)
        show_values(axes, panel.values, box)
        _frame(axes, box, colours[panel.group] if panel.group else FAINT)
        if not layout.headed:
            axes.text(box.left, top - 0.05, cut(panel.caption, 24), size=7, va="bottom")


def _frame(axes: "Axes", box: Box, colour: str) -> None:
    """A line round the box that covers nothing of it."""
    from matplotlib.patches import Rectangle

    corner = (box.left - _FRAME / 2, box.top - _FRAME / 2)
    size = (box.width + _FRAME, box.height + _FRAME)
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=_FRAME * 72, clip_on=False))


def _head(axes: "Axes", panels: Sequence[Panel], layout: _Layout, colours: dict[str, str]) -> float:
    """Captions above the columns, and a bar with the name over each group of several; returns their height."""
    for column, panel in enumerate(panels):
        x = column * layout.right + layout.panel / 2
        axes.text(x, -0.06, cut(panel.caption), size=7, ha="center", va="bottom")
    runs = [(name, len(list(members))) for name, members in groupby(panels, key=lambda panel: panel.group)]
    if not any(name for name, _ in runs) or len(runs) == len(panels):
        return _CAPTION
    left = 0.0
    for name, count in runs:
        width = count * layout.right - layout.gap
        y = -_CAPTION - 0.05
        axes.hlines(y, left, left + width, colors=colours[name], linewidth=2.5, clip_on=False)
        axes.text(left + width / 2, y - 0.05, cut(name), size=8, ha="center", va="bottom", color=colours[name])
        left += count * layout.right
    return _CAPTION + _GROUP_LINE
