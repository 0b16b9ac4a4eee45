"""Drawing a walk through the forward pass: ids, then every site in the order of computation, layer by layer."""

from collections.abc import Iterator
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from decodescope.cli.bars import bar
from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.forward_verdict import draw_reference, draw_verdict
from decodescope.cli.rope_view import draw_rope
from decodescope.cli.units import binary_bytes, figure, milliseconds, number, percent
from decodescope.locale import translate as t
from decodescope.visible import token_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from decodescope.analysis.residual import StreamChange
    from decodescope.experiments.forward_records import Edges, ForwardReport, Pass
    from decodescope.trace.site_records import LayerCost, SiteSummary

_NOT_SAID = "note.observed"  # of the trace's times; those shown here are without what looking took
_SITE_CELLS, _BROKEN_CELLS = 11, 8
_WIDE_CELLS, _BARS = 110, (12, 3)  # cells of a layer's line, and of its bars where it fits and where not


class _Column(NamedTuple):
    """A figure beside the site, right-aligned."""

    key: str
    cells: int
    shown: "Callable[[SiteSummary], str]"


_COLUMNS = (
    _Column("forward.mean", 9, lambda site: figure(site.mean)),
    _Column("forward.std", 9, lambda site: figure(site.std)),
    _Column("forward.min", 9, lambda site: figure(site.min)),
    _Column("forward.max", 9, lambda site: figure(site.max)),
    _Column("forward.l2", 9, lambda site: figure(site.l2)),
    _Column("forward.sum", 10, lambda site: figure(site.sum, 4)),
    _Column("forward.signature", 10, lambda site: figure(site.signature, 4)),
    _Column("forward.zeros", 9, lambda site: percent(site.zeros)),
)
_NARROW_WITHOUT = ("forward.signature", "forward.sum", "forward.zeros", "forward.std")  # the first goes first


def draw_forward(report: "ForwardReport") -> None:
    """The whole walk; what it showed stands at its end."""
    named = {"model": report.model, "architecture": report.architecture}
    out().print(line((t("forward.title", **named, dtype=report.dtype, device=report.device), "bold")))
    draw_notes(note for note in report.notes if note != _NOT_SAID)
    _draw_ids(report)
    if report.against is not None:
        draw_reference(report.against)
    for each in report.steps:
        _Walk(report, each).draw()
    if report.rope is not None:
        out().print()
        draw_rope(report.rope)
    draw_verdict(report)


def _draw_ids(report: "ForwardReport") -> None:
    """Every token with its id; the number before a line is the position of its first one."""
    out().print(line((t("forward.ids", count=len(report.ids)), "bold")))
    row = line()
    for token in report.tokens:
        style = "red reverse" if token.injected else "dim" if token.role == "template" else "cyan"
        cell = line((f"{token.token_id} ", "dim"), (token_text(token.text), style), "  ")
        if not row or row.cell_len + cell.cell_len > out().width:
            if row:
                out().print(row)
            row = line((f"{token.position:>5}  ", "dim"))
        row.append_text(cell)
    out().print(row)


class _Walk:
    """One step's sites, grouped by layer."""

    def __init__(self, report: "ForwardReport", at: "Pass") -> None:
        self.at, self.departure = at, report.departure
        self.sites = [site for site in report.sites if site.step == at.step]
        self.costs = {cost.layer: cost for cost in report.layers if cost.step == at.step}
        self.growth = {change.layer: change for change in report.growth if change.step == at.step}
        self.values = {(edges.layer, edges.site): edges for edges in report.values if edges.step == at.step}
        self.tensor_cells = max((len(_tensor(site)) for site in self.sites), default=0) + 1
        lengths = [change.norm_after for change in self.growth.values()]
        self.longest = max(filter(isfinite, lengths), default=0.0)
        self.columns = _fitting(out().width - self.tensor_cells)

    def draw(self) -> None:
        """Heading, groups, and the token that came of it."""
        places = {"step": self.at.step, "first": self.at.first, "last": self.at.last}
        out().print()
        out().print(line((t("forward.step", **places), "bold")))
        out().print(self._column_names())
        groups = [(layer, list(sites)) for layer, sites in groupby(self.sites, key=lambda site: site.layer)]
        for index, (layer, sites) in enumerate(groups):
            self._draw_heading(layer, before=layer is None and index == 0 and sites[0].site == "embed")
            for site in sites:
                self._draw_site(site)
        if self.at.text is not None and self.at.prob is not None:
            chosen = t("forward.chosen", id=self.at.token_id, prob=percent(self.at.prob))
            out().print(line(("▶ ", "green"), (token_text(self.at.text), "bold green"), (f"  {chosen}", "dim")))

    def _column_names(self) -> Text:
        named = _left(t("forward.site"), _SITE_CELLS) + _left(t("forward.tensor"), self.tensor_cells)
        figures = "".join(_right(t(column.key), column.cells) for column in self.columns)
        return line((f"  {named}{figures}{_right(t('forward.nonfinite_count'), _BROKEN_CELLS)}", "dim"))

    def _draw_heading(self, layer: int | None, before: bool) -> None:
        name = t("forward.before") if before else t("forward.after") if layer is None else f"layers.{layer}"
        cost = None if before else self.costs.get(layer)
        out().print(line((name, "bold cyan"), (_cost(cost), "dim")))
        if layer is not None and layer in self.growth:
            out().print(Text.assemble("  ", *_stream(self.growth[layer], self.longest)))

    def _draw_site(self, site: "SiteSummary") -> None:
        figures = "".join(_right(column.shown(site), column.cells) for column in self.columns)
        mark = "≈" if site.recomputed else ""
        here = (self.departure.step, self.departure.layer, self.departure.site) if self.departure else None
        departs = here == (site.step, site.layer, site.site)
        out().print(
            line(
                ("  " + _left(site.site + mark, _SITE_CELLS), "bold red" if departs else ""),
                (_left(_tensor(site), self.tensor_cells), "dim"),
                (figures, "dim" if site.recomputed else ""),
                (_right(str(site.nonfinite), _BROKEN_CELLS), "bold red" if site.nonfinite else "dim"),
                (f"  <-- {t('forward.first_departure')}" if departs else "", "bold red"),
            )
        )
        if (site.layer, site.site) in self.values:
            _draw_edges(self.values[site.layer, site.site])


def _fitting(cells: int) -> list[_Column]:
    """The columns that fit beside site and tensor; a document holds them all."""
    columns, room = list(_COLUMNS), cells - _SITE_CELLS - _BROKEN_CELLS - 2
    for key in _NARROW_WITHOUT:
        if sum(column.cells for column in columns) > room:
            columns = [column for column in columns if column.key != key]
    return columns


def _draw_edges(edges: "Edges") -> None:
    for row in edges.rows:
        numbers = [*(figure(value, 4) for value in row.head), *(["…"] if row.tail else [])]
        numbers += [figure(value, 4) for value in row.tail]
        index = ", ".join(map(str, row.index))
        shown = "".join(_right(text, 11 if text != "…" else 3) for text in numbers)
        out().print(line((_left(f"    [{index}]", _SITE_CELLS + 3), "dim"), (shown, "blue")))


def _tensor(site: "SiteSummary") -> str:
    return f"{site.dtype}[{','.join(map(str, site.shape))}]"


def _cost(cost: "LayerCost | None") -> str:
    if cost is None:
        return ""
    size = cost.memory.rss_bytes if cost.memory.device_bytes is None else cost.memory.device_bytes
    return f"  {milliseconds(cost.seconds)} · {binary_bytes(size)}"


def _stream(change: "StreamChange", longest: float) -> Iterator[str | tuple[str, str]]:
    """The residual stream's way through a layer: how long it is, how far it turned, which half added more."""
    cells = _BARS[out().width < _WIDE_CELLS]
    length = change.norm_after / longest if longest else 0.0
    grown = f"{figure(change.norm_before)} → {figure(change.norm_after)} ×{figure(change.growth)}"
    yield from ((t("forward.stream") + " ", "dim"), _left(grown, 20), (bar(length, cells, "·"), "blue"))
    yield from ((f"  {t('forward.cosine')} ", "dim"), _left(number(change.cosine), 7))
    yield bar(change.cosine, cells, "·"), "green"
    halves = bar(change.attention_share, cells, "░")
    attention = halves.rstrip("░")
    yield from ((f"  {t('forward.attention')} ", "dim"), _left(figure(change.attention_ratio), 6))
    yield from ((attention, "cyan"), (halves.removeprefix(attention), "magenta"))
    yield from (f" {figure(change.mlp_ratio)}", (" MLP", "dim"))


def _left(text: str, cells: int) -> str:
    return text + " " * (cells - cell_len(text))


def _right(text: str, cells: int) -> str:
    return " " * (cells - cell_len(text)) + text
