"""`decodescope model`: what a model is, what it costs, and whether it fits here."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport, line, out
from decodescope.cli.units import binary_bytes, count
from decodescope.locale import translate as t
from decodescope.trace.lines import json_text

if TYPE_CHECKING:
    from decodescope.catalogue import ModelCard

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help=t("help.config"), metavar="FILE", show_default=False)
]


def model(
    model: o.Model = "starter", config: ConfigFile = None, json: o.Json = False, lang: o.Lang = None
) -> None:
    from decodescope.catalogue import model_card

    with StderrReport() as report:
        card = model_card(model, config, report)
    if json:
        print(json_text(asdict(card)))
        return
    _draw_config(card)
    _draw_parameters(card)
    _draw_costs(card)


model.__doc__ = t("help.model_command")


def _heading(key: str, **values: object) -> None:
    out().print(line((t(f"model.{key}", **values), "bold")))


def _draw_config(card: "ModelCard") -> None:
    _heading("config")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in card.config.items():
        if name == "windows":
            value = sorted({w for w in value if w}) or t("model.none")
        if isinstance(value, float):
            value = f"{value:g}"
        if name == "rope":
            value = _rope(value)
        table.add_row(Text(f"  {name}", "dim"), Text(str(value)))
    out().print(table)


def _rope(rope: dict[str, object]) -> str:
    """The rotary settings that are in force."""
    plain = rope["kind"] == "default" and rope["divisors"] is None
    shown = {"theta": rope["theta"]} if plain else {k: v for k, v in rope.items() if v is not None}
    return " ".join(f"{key}={value}" for key, value in shown.items())


def _draw_parameters(card: "ModelCard") -> None:
    _heading("parameters")
    for name, value in card.parameters.items():
        out().print(line("  ", (f"{name:<14}", "dim"), f"{count(value):>16}"))
    if card.stored_bytes:
        _heading("stored")
        for name, size in card.stored_bytes.items():
            out().print(line("  ", (f"{name:<14}", "dim"), f"{count(size):>16}"))


def _draw_costs(card: "ModelCard") -> None:
    memory = card.fit
    available, total = binary_bytes(memory["memory_available_bytes"]), binary_bytes(memory["memory_total_bytes"])
    _heading("weights", available=available, total=total)
    for name, row in memory["dtypes"].items():
        sizes = f"{count(row['weight_bytes']):>16}  {binary_bytes(row['needed_bytes']):>11}  "
        out().print(line("  ", (f"{name:<14}", "dim"), sizes, _verdict(row)))
    context = card.config["max_position_embeddings"]
    _heading("cache", saving=f"{card.gqa_saving:g}")
    for name, per_token in card.kv_bytes_per_token.items():
        lengths = "  ".join(_at(n, size, n > context) for n, size in card.kv_bytes_at[name].items())
        out().print(line("  ", (f"{name:<14}", "dim"), f"{count(per_token):>16}  {lengths}"))
    out().print(line(t("model.context", context=count(context))))


def _verdict(fits: dict[str, Any]) -> str:
    return t("model.fits" if fits["weights_fit"] else "model.does_not_fit", tokens=count(fits["tokens_left"]))


def _at(length: int, size: int, beyond: bool) -> str:
    return f"{length // 1024}k{'*' if beyond else ''} {binary_bytes(size):>10}"
