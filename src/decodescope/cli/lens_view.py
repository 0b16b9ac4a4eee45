"""Drawing the lens: position by position what every layer would have said, then where the logit comes from."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from decodescope.cli.attribution_view import draw_attribution
from decodescope.cli.bars import bar
from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.tables import plain_table
from decodescope.cli.units import number, percent
from decodescope.locale import translate as t
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.experiments.lens_records import (
        LensLayer,
        LensPosition,
        LensReport,
        LensToken,
    )

_BAR_CELLS = 8
_WIDEST_TOKEN, _WIDEST_SHARE, _GAP = 10, 5, 2  # cells
_BESIDE_TOKENS, _TARGET_CELLS = 52, 18
_SHOWN_PROMPT = 64  # tokens at its end
_FIRST, _STAYS = "◇", "◆"
_CHOICE, _TARGET = "bold green", "bold magenta"


def draw_lens(report: "LensReport") -> None:
    """The whole report."""
    loaded = {"architecture": report.architecture, "dtype": report.dtype, "device": report.device}
    out().print(line((t("lens.title", model=report.model, **loaded), "bold")))
    draw_notes(report.notes)
    out().print(line((t("lens.how"), "dim")))
    out().print(line((t("lens.error", error=f"{report.last_layer_error:.1e}"), "dim")))
    for row in _prompt_rows(report):
        out().print(row)
    for position in report.positions:
        out().print()
        _draw_position(position, report.target)
        draw_attribution(position.attribution)


def _prompt_rows(report: "LensReport") -> Iterable[Text]:
    """The end of the prompt, each token behind its position; those looked at stand out."""
    looked_at = {position.position for position in report.positions}
    tokens = list(enumerate(report.prompt))[-_SHOWN_PROMPT:]
    row = line("" if len(tokens) == len(report.prompt) else "… ")
    for place, token in tokens:
        style = "bold cyan underline" if place in looked_at else "cyan"
        cell = line((f"{place} ", "dim"), (token_text(token.text), style), "  ")
        if row.cell_len + cell.cell_len > out().width:
            yield row
            row = line()
        row.append_text(cell)
    yield row


def _draw_position(position: "LensPosition", target: "LensToken | None") -> None:
    out().print(_headline(position))
    tokens = _token_columns(position, target)
    table = plain_table(("lens.layer",))
    table.add_column("", no_wrap=True)
    for rank in range(len(tokens)):
        table.add_column("" if rank else t("lens.said"), no_wrap=True)
    for key in ("lens.entropy", "lens.kl", "lens.rank", "lens.prob"):
        table.add_column(t(key), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if target is not None:
        table.add_column(t("lens.target_rank"), justify="right", no_wrap=True, style="magenta")
        table.add_column(t("lens.target_prob"), justify="right", no_wrap=True, style="magenta")
    for row, layer in enumerate(position.layers):
        said = (column[row] for column in tokens)
        table.add_row(Text(str(layer.layer)), _mark(layer.layer, position), *said, *_figures(layer))
    out().print(table)
    out().print(line("  ", (t("lens.units", token=token_text(position.choice.text)), "dim")))
    if len(tokens) < len(position.layers[0].top):
        fitting = {"shown": len(tokens), "top": len(position.layers[0].top)}
        out().print(line("  ", (t("lens.narrow", **fitting), "dim")))
    out().print(line("  ", *_where(position.choice, position.first_layer, position.stays_from_layer, _CHOICE)))
    if target is not None and target != position.choice:
        first, stays = position.target_first_layer, position.target_stays_from_layer
        out().print(line("  ", *_where(target, first, stays, _TARGET)))


def _headline(position: "LensPosition") -> Text:
    """The token, and what stands or would stand behind it."""
    if position.chosen:
        said = t("lens.chosen", step=position.step, prob=percent(position.choice_prob))
    else:
        following = token_text(position.next_token.text)
        said = t("lens.not_chosen", prob=percent(position.choice_prob), next=following)
    return line(
        (t("lens.position", position=position.position) + "  ", "bold"),
        (token_text(position.text), "bold cyan"),
        " → ",
        (token_text(position.choice.text), _CHOICE),
        (f"  id {position.choice.token_id} · {said}", "dim"),
    )


def _token_columns(position: "LensPosition", target: "LensToken | None") -> list[list[Text]]:
    """What every layer would have said: as many columns of tokens as fit beside the figures, at least one."""
    room = out().width - _BESIDE_TOKENS - (0 if target is None else _TARGET_CELLS)
    styles = {position.choice.token_id: _CHOICE} | ({} if target is None else {target.token_id: _TARGET})
    columns: list[list[Text]] = []
    for candidates in zip(*(layer.top for layer in position.layers), strict=True):
        texts = [_cut(token_text(candidate.text)) for candidate in candidates]
        widest = max(map(cell_len, texts))
        room -= widest + _WIDEST_SHARE + _GAP
        if columns and room < 0:
            break
        columns.append(
            [
                Text.assemble(
                    (set_cell_size(text, widest), styles.get(candidate.token_id, "")),
                    (f"{_short(candidate.prob):>{_WIDEST_SHARE}}", "dim"),
                )
                for text, candidate in zip(texts, candidates, strict=True)
            ]
        )
    return columns


def _figures(layer: "LensLayer") -> Sequence[Text]:
    choice = (number(layer.entropy_nats, 2), number(layer.kl_nats, 2), str(layer.choice_rank))
    cells = [
        *map(Text, choice),
        Text(percent(layer.choice_prob)),
        Text(bar(layer.choice_prob, _BAR_CELLS), "green"),
    ]
    if layer.target_prob is None:
        return cells
    return [*cells, Text(str(layer.target_rank)), Text(percent(layer.target_prob))]


def _mark(layer: int, position: "LensPosition") -> Text:
    if layer == position.stays_from_layer:
        return Text(_STAYS, _CHOICE)
    return Text(_FIRST if layer == position.first_layer else "", _CHOICE)


def _where(
    token: "LensToken", first: int | None, stays: int | None, style: str
) -> Iterable[str | tuple[str, str]]:
    """In which layers a token comes to the top."""
    yield token_text(token.text), style
    if first is None:
        yield "  " + t("lens.never")
    elif first == stays:
        yield f"  {_STAYS} " + t("lens.at_once", layer=first)
    else:
        yield f"  {_FIRST} " + t("lens.first", layer=first)
        yield f"  {_STAYS} " + t("lens.stays", layer=stays) if stays is not None else "  " + t("lens.lost")


def _short(prob: float) -> str:
    """A probability in few cells."""
    if 0 < prob < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= prob < 1 else f"{prob:.0%}"


def _cut(text: str) -> str:
    """A token in the cells that it may take; a Chinese character takes two."""
    return text if cell_len(text) <= _WIDEST_TOKEN else set_cell_size(text, _WIDEST_TOKEN - 1) + "…"
