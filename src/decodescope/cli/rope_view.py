"""Drawing the rotary positions: every pair at a position, the law of the distance, where word order is seen."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from decodescope.cli.bars import bar
from decodescope.cli.console import out
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import count, number
from decodescope.locale import translate as t
from decodescope.visible import token_text, visible

if TYPE_CHECKING:
    from decodescope.experiments.rope_records import DistanceLaw, OrderSeen, RopeReport, RowsApart, WordOrder

_TURN_CELLS = 16
_PAIR_COLUMNS = (
    "rope.pair",
    "rope.units",
    "rope.frequency",
    "rope.slowed",
    "rope.wavelength",
    "rope.angle",
    "rope.turns",
    "rope.cos",
    "rope.sin",
    "rope.turn",
)
_LEFT = {"rope.units", "rope.turn", "rope.rotation", "rope.mask", "rope.row", "rope.next"}


def draw_rope(report: "RopeReport") -> None:
    """Frequencies and angles, the distance law, the experiment on word order."""
    _draw_pairs(report)
    _draw_law(report.law)
    _draw_order(report.word_order)


def _draw_pairs(report: "RopeReport") -> None:
    settings = ", ".join(f"{name} {value:g}" for name, value in report.settings.items())
    named = {
        "theta": f"{report.theta:,.10g}",
        "kind": report.kind,
        "settings": f" ({settings})" if settings else "",
    }
    draw_heading(t("rope.title", **named, pairs=len(report.pairs), size=report.head_dim))
    for said in _remarks(report):
        _say(said)
    table = plain_table(_PAIR_COLUMNS, _LEFT)
    for pair in report.pairs:
        angle = (f"{pair.angle_radians:,.4f}", f"{pair.turns:,.4f}", number(pair.cos, 4), number(pair.sin, 4))
        slowed = "" if pair.slowed == 1 else f"÷ {pair.slowed:.4g}"
        pace = (f"{pair.frequency:.4g}", slowed, f"{pair.wavelength_tokens:,.1f}")
        cells = (str(pair.pair), f"{pair.first} · {pair.second}", *pace, *angle)
        turn = Text(bar(pair.turn, _TURN_CELLS, rest="·"), "cyan")
        table.add_row(*map(Text, cells), turn, style="dim" if pair.wavelength_tokens > report.context else "")
    out().print(table)
    _say(t("rope.dim", context=count(report.context)), "dim")


def _remarks(report: "RopeReport") -> Iterable[str]:
    pairs = len(report.pairs)
    if report.kept == pairs:
        yield t("rope.all_kept", pairs=pairs)
    else:
        yield t("rope.slowed_some", kept=report.kept, pairs=pairs, most=f"{report.slowed_most:.4g}")
    if report.divisors:
        yield t("rope.divisors")
    if report.attention_factor != 1:
        yield t("rope.attention_factor", factor=f"{report.attention_factor:.6g}")
    at = {"position": count(report.position), "context": count(report.context)}
    yield t("rope.position" if report.position < report.context else "rope.beyond", **at)


def _draw_law(law: "DistanceLaw") -> None:
    whose = {"layer": law.layer, "head": law.head, "kv_head": law.kv_head}
    draw_heading(t("rope.law", **whose, token=token_text(law.text), position=law.position))
    table = plain_table(("rope.distance",), _LEFT)
    for start in law.starts:
        table.add_column(f"n = {count(start)}", justify="right", no_wrap=True)
    for key in ("rope.spread", "rope.spread_float64"):
        table.add_column(t(key), justify="right", no_wrap=True)
    for row in law.rows:
        products = [number(product, 4) for product in row.products]
        blank = [""] * (len(law.starts) - len(products))
        spreads = (_small(row.spread), _small(row.spread_float64))
        table.add_row(*map(Text, (count(row.distance), *products, *blank, *spreads)))
    out().print(table)
    _say(t("rope.unrotated", product=number(law.unrotated, 4)))
    found = {"exact": _small(law.spread_float64), "spread": _small(law.spread), "norms": f"{law.norms:.5g}"}
    far = {"last": count(law.starts[-1])}
    if law.holds:
        _say(t("rope.law_holds", **found, **far) + " ✓", "green")
    else:
        _say(t("rope.law_broken", **found, **far) + " ✗", "red")


def _draw_order(order: "WordOrder") -> None:
    first, second = order.orders
    draw_heading(t("rope.order", first=first.text, second=second.text))
    for one in order.orders:
        _say(f"{'│'.join(map(token_text, one.texts))}  [{' '.join(map(str, one.token_ids))}]", "dim")
    if order.by_character:
        _say(t("rope.by_character"))
    table = plain_table(("rope.rotation", "rope.mask", "rope.row"), _LEFT)
    for depth in order.depths:
        table.add_column(t("rope.after", layers=depth), justify="right", no_wrap=True)
    for key in ("rope.noise", "rope.from_layer", "rope.next"):
        table.add_column(t(key), justify="left" if key in _LEFT else "right", no_wrap=True)
    for way in order.ways:
        following = " / ".join(map(token_text, way.next_texts))
        switches = (_switch(way.rotation), _switch(way.causal))
        table.add_row(*map(Text, switches), Text(t("rope.last")), *_apart(way.last, order.depths), Text(following))
        table.add_row("", "", Text(t("rope.others")), *_apart(way.others, order.depths))
    out().print(table)
    for way in order.ways:
        _say(_told(way))
    for key in ("rope.how", "rope.how_rows"):
        _say(t(key), "dim")


def _apart(rows: "RowsApart", depths: tuple[int, ...]) -> list[Text]:
    """The differences, those that are more than noise in green; the noise at the end; the first layer apart."""
    shown = [
        Text(_small(rows.by_layer[depth - 1]), "green" if rows.from_layer and depth >= rows.from_layer else "")
        for depth in depths
    ]
    return [*shown, Text(_small(rows.noise[-1]), "dim"), Text(_layer(rows))]


def _told(way: "OrderSeen") -> str:
    """What the figures of one way show, and no more."""
    named = t("rope.way", rotation=_switch(way.rotation), mask=_switch(way.causal))
    last, others = way.last.from_layer, way.others.from_layer
    if last is None and others is None:
        return t("rope.order_nowhere", way=named)
    if last == 1:
        return t("rope.order_at_once", way=named)
    if way.causal and last and others and others < last:
        return t("rope.order_later", way=named, layer=last, others=others)
    return t("rope.order_else", way=named, layer=_layer(way.last), others=_layer(way.others))


def _layer(rows: "RowsApart") -> str:
    return "-" if rows.from_layer is None else str(rows.from_layer)


def _switch(on: bool) -> str:
    return t("rope.on" if on else "rope.off")


def _small(value: float) -> str:
    return f"{value:.1e}"


def _say(text: str, style: str = "") -> None:
    """A sentence, broken at the width of the terminal."""
    out().print(Padding(Text(visible(text), style), (0, 0, 0, 2)), soft_wrap=False)
