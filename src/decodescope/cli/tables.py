"""Headings and tables as most views draw them."""

from collections.abc import Collection, Iterable

from rich.table import Table

from decodescope.cli.console import line, out
from decodescope.locale import translate as t


def draw_heading(text: str) -> None:
    """A line that opens a part of a view."""
    out().print(line((text, "bold")))


def plain_table(columns: Iterable[str] = (), left: Collection[str] = ()) -> Table:
    """A table without lines; `columns` are catalogue keys, numbers but for those in `left`."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 0, 0, 2))
    for key in columns:
        table.add_column(t(key), justify="left" if key in left else "right", no_wrap=True)
    return table
