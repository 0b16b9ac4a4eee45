"""`decodescope tokens`: from text to ids, every stage side by side."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport, line, out
from decodescope.cli.run import read_prompt
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.lines import json_text
from decodescope.visible import token_text, visible

if TYPE_CHECKING:
    from decodescope.catalogue import Tokenization, TokenRow


def tokens(
    text: Annotated[str | None, o.prompt_argument("tokens.text")] = None,
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    messages: o.Messages = None,
    json: o.Json = False,
    lang: o.Lang = None,
) -> None:
    from decodescope.catalogue import tokenize

    if messages is not None and chat is False:
        raise InputError("run.raw_messages")

    if (text is None) == (messages is None):
        raise InputError("tokens.one_text")
    plain = None if text is None else read_prompt(text)
    with StderrReport() as report:
        found = tokenize(model, plain, chat=bool(chat), system=system, messages_file=messages, report=report)
    if json:
        print(json_text(asdict(found)))
    else:
        _draw(found)


tokens.__doc__ = t("help.tokens")


def _draw(found: "Tokenization") -> None:
    normalised = t("tokens.unchanged") if found.normalised == found.text else visible(found.normalised)
    pieces = " │ ".join(map(token_text, found.pieces))
    for key, value in (("text", visible(found.text)), ("normalised", normalised), ("pieces", pieces)):
        out().print(line((t(f"tokens.{key}"), "bold")))
        out().print(Text("  " + value), soft_wrap=False)
    out().print(_table(found.tokens))
    if found.dropped:
        out().print(line((t("tokens.dropped", pieces=" ".join(map(token_text, found.dropped))), "red")))
    out().print(line((t("tokens.ids", count=len(found.ids)), "bold")))
    out().print(Text(f"  [{', '.join(map(str, found.ids))}]"), soft_wrap=False)


def _table(rows: "Sequence[TokenRow]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("index", "token", "id", "bytes", "role", "remark"):
        table.add_column(t(f"tokens.column.{name}"), justify="right" if name in ("index", "id") else "left")
    for index, token in enumerate(rows):
        remarks = [t(f"tokens.{mark}") for mark in ("partial", "injected") if getattr(token, mark)]
        style = "red" if token.injected else ""
        cells = (str(index), token_text(token.text), str(token.id), token.bytes_hex, token.role)
        table.add_row(*(Text(cell, style) for cell in cells), Text(", ".join(remarks), "yellow"))
    return table
