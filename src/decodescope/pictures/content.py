"""What a picture is made of: arrays, and texts that the caller has made safe to show."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
LONGEST_ROW = 8  # panels beside each other where nothing else decides


@dataclass(frozen=True, slots=True)
class Texts:
    """The words round a picture; an empty one is left out. `scale` explains the colours."""

    title: str
    x: str = ""
    y: str = ""
    scale: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values [R, C] in [0, 1], NaN where nothing is to be seen, with a label for each row and column.

    `cells` [R, C] are texts written into the cells, such as a lens's tokens. Raises ValueError where the
    labels or cells do not fit the values.
    """

    values: Floats
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        widths = {len(row) for row in self.cells}
        if self.values.shape != shape:
            raise ValueError(f"{shape} labels for values {self.values.shape}")
        if self.cells and (len(self.cells) != shape[0] or widths != {shape[1]}):
            raise ValueError(f"{len(self.cells)} rows of {widths} cells for values {self.values.shape}")


@dataclass(frozen=True, slots=True)
class Panel:
    """One small matrix [R, C] of an atlas, values as in `Matrix`; panels of one `group` share a colour."""

    values: Floats
    caption: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels beside each other, and the words before them."""

    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through the points (x, y), each [N]; a NaN in `y` leaves a gap."""

    label: str
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value, the least and the most it was measured as, and what it could be (None: unknown)."""

    label: str
    value: float
    least: float
    most: float
    limit: float | None = None


def rows_by_group(panels: Sequence[Panel]) -> tuple[Row, ...]:
    """A row for each run of panels of one group, captioned with its name; long runs take several rows.

    Where every panel is a group of its own they follow each other without captions.
    """
    runs = [(group, tuple(members)) for group, members in groupby(panels, key=lambda panel: panel.group)]
    if len(runs) == len(panels):
        return tuple(Row("", some) for some in _lines(panels))
    rows: list[Row] = []
    for group, members in runs:
        first, *others = _lines(members)
        rows += [Row(group, first), *(Row("", some) for some in others)]
    return tuple(rows)


def _lines(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    return [panels[start : start + LONGEST_ROW] for start in range(0, len(panels), LONGEST_ROW)]
