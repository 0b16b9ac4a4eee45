"""Drawing attention in a terminal: heat maps of shaded cells, and what the heads are like, by their KV head."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.shades import Shaded, room_for_cells, scale_line, shaded_lines
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import number, percent
from decodescope.locale import translate as t
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.experiments.attention import Attention
    from decodescope.experiments.attention_records import AttentionReport, Grid, HeadAttention, Span

_MOST_MAPS, _MOST_ROWS, _MOST_NAMED = 4, 64, 8
_GROUP_STYLES = ("cyan", "yellow", "green", "magenta")  # in turn: neighbouring KV heads differ
_LEFT = {"attention.character"}
_HEAD_COLUMNS = ("attention.kv_head", "attention.head", "attention.entropy", "attention.distance")
# The characters that have a name, by the share that makes them.
_SHARES = {
    "previous": ("attention.previous", "previous_share"),
    "self": ("attention.self", "self_share"),
    "duplicate": ("attention.duplicate", "duplicate_share"),
    "first": ("attention.first", "sink_share"),
}


def draw_attention(found: "Attention") -> None:
    """Everything that fits a terminal: one heat map a head where few were chosen, else a strip a layer or head."""
    report, grid = found.report, found.grid
    one_layer = len(grid.layers) == 1
    as_maps = one_layer and len(grid.heads) <= _MOST_MAPS and len(grid.rows) > 1
    grid = grid.within(_MOST_ROWS if as_maps else len(grid.rows), room_for_cells(out().width))
    _draw_head(report, grid)
    if as_maps:
        _draw_maps(report, grid)
    for step, heads in groupby(report.heads, key=lambda head: head.step):
        of_step = list(heads)
        if not as_maps:
            _draw_strips(report, grid, of_step)
        _heading(t("attention.figures", step=step, rows=len(of_step[0].positions)))
        if one_layer:
            _draw_figures(report, of_step)
        else:
            _draw_characters(of_step)
    out().print(Text(t("attention.units"), "dim"), soft_wrap=False)


def _draw_head(report: "AttentionReport", grid: "Grid") -> None:
    loaded = {"architecture": report.architecture, "dtype": report.dtype, "device": report.device}
    out().print(line((t("attention.title", model=report.model, **loaded), "bold")))
    draw_notes(report.notes)
    out().print(line((t("attention.how"), "dim")))
    out().print(line((error_text(report), "dim")))
    if grid.pooled != (1, 1):
        out().print(line((pooled_text(grid), "yellow")))
    out().print(scale_line())


def error_text(report: "AttentionReport") -> str:
    """How well the recomputed weights give the layers' own outputs."""
    return t("attention.error", error=f"{report.reconstruction_error:.1e}")


def pooled_text(grid: "Grid") -> str:
    """What a cell of a long prompt stands for."""
    rows, columns = grid.pooled
    return t("attention.pooled", rows=rows, columns=columns)


def group_name(kv_head: int) -> str:
    """The name of the query heads that share a key/value head."""
    return t("attention.group", kv_head=kv_head)


def labels(report: "AttentionReport", spans: Sequence["Span"]) -> list[str]:
    """A token, or the positions that share a bin."""
    return [
        token_text(report.tokens[span.first].text) if span.is_one else f"{span.first}–{span.last}"
        for span in spans
    ]


def _draw_maps(report: "AttentionReport", grid: "Grid") -> None:
    """One heat map for each head, queries downwards and keys across."""
    spans = zip(grid.rows, labels(report, grid.rows), strict=True)
    names = [
        line((f"{span.first:>4} ", "dim"), name) if span.is_one else line(f"{name:>10}") for span, name in spans
    ]
    kv_heads = {head.head: head.kv_head for head in report.heads}
    for index, head in enumerate(grid.heads):
        title = t("attention.one_head", layer=grid.layers[0], head=head)
        _heading(f"{title} · {group_name(kv_heads[head])}")
        _draw_shaded(report, grid, names, grid.values[0, index].tolist())


def _draw_strips(report: "AttentionReport", grid: "Grid", heads: Sequence["HeadAttention"]) -> None:
    """What the step's last row gives to each token: a strip for each layer, or for each head of the only one."""
    position = heads[0].positions[-1]
    place = {"position": position, "token": token_text(report.tokens[position].text)}
    if len(grid.layers) > 1:
        _heading(t("attention.by_layer", **place, heads=len(grid.heads)))
        names = [line(t("attention.layer", layer=layer)) for layer in grid.layers]
        _draw_shaded(report, grid, names, grid.over_heads(position).tolist())
    else:
        _heading(t("attention.by_head", **place, layer=grid.layers[0]))
        names = [line((f"{group_name(head.kv_head)} · {head.head}", _style(head.kv_head))) for head in heads]
        _draw_shaded(report, grid, names, grid.values[0, :, grid.row_of(position)].tolist())


def _draw_shaded(
    report: "AttentionReport", grid: "Grid", names: Sequence[Text], rows: Sequence[Sequence[float]]
) -> None:
    numbers = [span.first for span in grid.columns]
    shaded = Shaded(names, labels(report, grid.columns), numbers, rows)
    for drawn in shaded_lines(shaded, out().width):
        out().print(drawn)


def _draw_figures(report: "AttentionReport", heads: Sequence["HeadAttention"]) -> None:
    """The heads of one layer, those of a KV head together."""
    shares = (column for column, _ in _SHARES.values())
    table = plain_table((*_HEAD_COLUMNS, *shares, "attention.character"), _LEFT)
    table.add_column(t("attention.top"), no_wrap=True)
    for kv_head, group in groupby(heads, key=lambda head: head.kv_head):
        for number_in_group, head in enumerate(group):
            shown = "" if number_in_group else str(kv_head)
            figures = (str(head.head), number(head.entropy_nats, 2), number(head.distance_tokens, 1))
            top = f"{head.top_position} {token_text(report.tokens[head.top_position].text)}"
            table.add_row(
                Text(shown, _style(kv_head)),
                *map(Text, figures),
                *(_share(head, name) for name in _SHARES),
                Text(_character(head.character), "" if head.character == "mixed" else "bold"),
                line(top, (f"  {percent(head.top_share)}", "dim")),
            )
    out().print(table)


def _draw_characters(heads: Sequence["HeadAttention"]) -> None:
    """The heads that live on one share, the strongest of each kind, by layer and KV head."""
    table = plain_table(("attention.character", "attention.how_many"), _LEFT)
    table.add_column(t("attention.strongest"), no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, (column, share) in _SHARES.items():
        of_kind = [head for head in heads if head.character == name]
        named = (Text(t(column), "bold"), Text(str(len(of_kind))))
        if not of_kind:
            table.add_row(*named)
        for row in _strongest(of_kind, share):
            table.add_row(*named, *row)
            named = (Text(), Text())
    mixed = [head for head in heads if head.character == "mixed"]
    table.add_row(Text(t("attention.mixed"), "bold"), Text(str(len(mixed))))
    out().print(table)


def _strongest(heads: Sequence["HeadAttention"], share: str) -> Iterator[tuple[Text, Text]]:
    """The heads that live most on a share, a line for each KV head."""
    strongest = sorted(heads, key=lambda head: getattr(head, share), reverse=True)[:_MOST_NAMED]
    strongest.sort(key=lambda head: (head.layer, head.head))
    for (layer, kv_head), group in groupby(strongest, key=lambda head: (head.layer, head.kv_head)):
        place = f"{t('attention.layer', layer=layer)} · {group_name(kv_head)}"
        named = line()
        for head in group:
            named.append(f"{t('attention.head')} {head.head} ").append(
                f"{percent(getattr(head, share))}   ", "dim"
            )
        yield Text(place, _style(kv_head)), named


def _share(head: "HeadAttention", name: str) -> Text:
    share = getattr(head, _SHARES[name][1])
    return Text("–" if share is None else percent(share), "bold" if head.character == name else "")


def _character(name: str) -> str:
    return t(_SHARES[name][0]) if name in _SHARES else t("attention.mixed")


def _style(kv_head: int) -> str:
    return _GROUP_STYLES[kv_head % len(_GROUP_STYLES)]


def _heading(text: str) -> None:
    out().print()
    draw_heading(text)
