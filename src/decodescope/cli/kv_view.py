"""Drawing the KV cache: growth step by step, layers beside the formula, what it would cost, what it buys."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from decodescope.cli.bars import bar, sparkline
from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.one_prompt import tell_image
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import binary_bytes, count, milliseconds, number
from decodescope.locale import translate as t
from decodescope.visible import token_text, visible

if TYPE_CHECKING:
    from decodescope.experiments.cache_records import CacheReport, Comparison, Timing

_BAR_CELLS = 24
_LINE_CELLS = 64
_STEP_COLUMNS = (
    "kv.step",
    "kv.token",
    "kv.fed",
    "kv.cached",
    "kv.used",
    "kv.allocated",
    "kv.seconds",
    "kv.filled",
)
_LAYER_COLUMNS = ("kv.layer", "kv.shape", "kv.dtype", "kv.device", "kv.used", "kv.allocated", "kv.by_formula")
_DTYPE_COLUMNS = ("kv.dtype", "kv.per_token")
_CURVE_COLUMNS = ("kv.length", "kv.way", "kv.token_forwards", "kv.by_formula", "kv.time", "kv.bar")
_LEFT = {"kv.token", "kv.shape", "kv.dtype", "kv.device", "kv.way", "kv.filled", "kv.bar"}


def draw_table(report: "CacheReport") -> None:
    """One run's cache."""
    named = {"model": report.model, "architecture": report.architecture}
    out().print(line((t("kv.title", **named, dtype=report.dtype, device=report.device), "bold")))
    draw_notes(report.notes)
    _draw_steps(report)
    _draw_layers(report)
    _draw_costs(report)


def _draw_steps(report: "CacheReport") -> None:
    draw_heading(t("kv.growth", prompt=report.prompt_tokens, new=len(report.steps)))
    table = plain_table(_STEP_COLUMNS, _LEFT)
    for step in report.steps:
        cells = (count(step.step), token_text(step.text), count(step.fed_tokens), count(step.cached_tokens))
        sizes = (count(step.used_bytes), count(step.allocated_bytes), milliseconds(step.seconds))
        filled = bar(step.used_bytes / step.allocated_bytes, _BAR_CELLS, rest="·")
        table.add_row(*map(Text, (*cells, *sizes)), Text(filled, "cyan"))
    out().print(table)
    used = [step.used_bytes for step in report.steps]
    ends = {"first": count(used[0]), "last": count(used[-1])}
    out().print(line("  ", t("kv.grown", **ends), "  ", (sparkline(used, _LINE_CELLS), "cyan")))
    out().print(line("  ", (t("kv.reads", bytes=binary_bytes(used[-1])), "dim")))


def _draw_layers(report: "CacheReport") -> None:
    draw_heading(t("kv.layers"))
    table = plain_table(_LAYER_COLUMNS, _LEFT)
    for layer in report.layers:
        sizes = (count(layer.used_bytes), count(layer.allocated_bytes))
        cells = (str(layer.layer), str(list(layer.shape)), layer.dtype, layer.device, *sizes)
        table.add_row(*map(Text, cells), _beside(layer.formula_bytes, layer.agrees))
    sizes = (count(report.used_bytes), count(report.allocated_bytes))
    table.add_row(
        *(Text(cell, "bold") for cell in (t("kv.all"), "", "", "", *sizes)),
        _beside(report.formula_bytes, report.agrees),
    )
    out().print(table)
    agree = report.bytes_per_token == report.bytes_per_token_formula
    beside = _beside(report.bytes_per_token_formula, agree)
    out().print(line("  ", t("kv.one_token", bytes=count(report.bytes_per_token)), "  ").append_text(beside))


def _draw_costs(report: "CacheReport") -> None:
    gqa, fit = report.gqa, report.fit
    draw_heading(t("kv.costs"))
    saving = {"heads": gqa.query_heads, "kv_heads": gqa.kv_heads, "ratio": f"{gqa.ratio:g}"}
    both = {"bytes": count(gqa.bytes_per_token), "mha": count(gqa.mha_bytes_per_token)}
    out().print(line("  ", t("kv.gqa", **saving, **both)))
    lengths = tuple(report.cache_dtypes[0].bytes_at)
    table = plain_table(_DTYPE_COLUMNS, _LEFT)
    for length in lengths:
        table.add_column(f"{length // 1024}k{'*' if length > fit.context else ''}", justify="right")
    table.add_column("")
    for row in report.cache_dtypes:
        mark = t("kv.in_use") if row.in_use else ""
        sizes = [binary_bytes(size) for size in row.bytes_at.values()]
        cells = (row.dtype, count(row.bytes_per_token), *sizes, mark)
        table.add_row(*(Text(cell, "bold" if row.in_use else "") for cell in cells))
    out().print(table)
    memory = {"available": binary_bytes(fit.memory_available_bytes), "total": binary_bytes(fit.memory_total_bytes)}
    left = {"by_memory": count(fit.tokens_by_memory), "left": count(fit.tokens_left)}
    for said in (t("kv.notes", context=count(fit.context)), t("kv.fit", **memory, **left)):
        out().print(line("  ", said))


def draw_curve(report: "CacheReport") -> None:
    """With and without the cache, at every length measured."""
    if report.compared:
        draw_heading(t("kv.curve", new=report.cached[0].new_tokens, repeats=len(report.cached[0].repeats_seconds)))
        table = plain_table(_CURVE_COLUMNS, _LEFT)
        longest = max(timing.seconds for timing in (*report.cached, *report.uncached))
        for cached, uncached in zip(report.cached, report.uncached, strict=True):
            _add_timing(table, cached, t("kv.with_cache"), "green", longest)
            _add_timing(table, uncached, t("kv.without_cache"), "blue", longest)
        out().print(table)
        for comparison in report.compared:
            out().print(line("  ", *_verdict(comparison)))
        out().print(line("  ", (t("kv.how"), "dim")))
    if not report.complete:
        out().print(line((t("kv.incomplete"), "yellow")))


def _add_timing(table: Table, timing: "Timing", way: str, style: str, longest: float) -> None:
    formula = _beside(timing.token_forwards_formula, timing.token_forwards == timing.token_forwards_formula)
    cells = (count(timing.length), way, count(timing.token_forwards))
    seconds = Text(f"{number(timing.seconds)} s")
    table.add_row(*map(Text, cells), formula, seconds, Text(bar(timing.seconds / longest, _BAR_CELLS), style))


def _verdict(comparison: "Comparison") -> Iterable[str | tuple[str, str]]:
    ratios = {"fewer": number(comparison.token_forwards_ratio, 1), "faster": number(comparison.seconds_ratio, 2)}
    yield t("kv.verdict", length=count(comparison.length), **ratios) + "  "
    if comparison.same_tokens:
        yield t("kv.same") + " ✓", "green"
    else:
        yield t("kv.parts", step=comparison.parts_at) + " ✗", "red"


def write_picture(path: Path, report: "CacheReport") -> None:
    """Seconds by length, one line for each way. Raises InputError."""
    import numpy as np

    from decodescope.pictures import Curve, Texts, draw_curves

    ways = ((t("kv.with_cache"), report.cached), (t("kv.without_cache"), report.uncached))
    curves = [
        Curve(way, np.array([run.length for run in runs]), np.array([run.seconds for run in runs]))
        for way, runs in ways
    ]
    title = t("kv.picture", model=visible(report.model), new=report.cached[0].new_tokens)
    missing = draw_curves(path, curves, Texts(title, x=t("kv.prompt_tokens"), y=t("kv.axis_seconds")))
    tell_image(path, missing)


def _beside(formula: int, agrees: bool) -> Text:
    """A number of the formula, and whether what was measured is the same."""
    return Text.assemble(count(formula), (" ✓", "green") if agrees else (" ✗", "red"))
