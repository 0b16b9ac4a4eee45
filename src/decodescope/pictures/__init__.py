"""Pictures as files: heat maps, small multiples and curves, drawn by matplotlib where it is installed."""

from decodescope.pictures.atlas import draw_atlas
from decodescope.pictures.bars import draw_bars
from decodescope.pictures.canvas import check_picture
from decodescope.pictures.content import Bar, Curve, Matrix, Panel, Row, Texts, rows_by_group
from decodescope.pictures.curves import draw_curves, draw_stacked
from decodescope.pictures.heat_map import draw_heat_map

__all__ = [
    "Bar",
    "Curve",
    "Matrix",
    "Panel",
    "Row",
    "Texts",
    "check_picture",
    "draw_atlas",
    "draw_bars",
    "draw_curves",
    "draw_heat_map",
    "draw_stacked",
    "rows_by_group",
]
