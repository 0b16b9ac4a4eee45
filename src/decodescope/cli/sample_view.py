"""Drawing settings side by side: the figures, the texts and why they part, and each setting over its seeds."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from decodescope.cli.console import draw_notes, err, line, out
from decodescope.cli.parting_view import parting_sentences
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import number, percent
from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.sequences import common_length

if TYPE_CHECKING:
    from decodescope.experiments.sample_records import SampleReport, SampleRow, SettingSummary, Spread

_NONE = "-"
_WIDE = 110  # columns that hold the figures and settings to read
_ROW_COLUMNS = (
    "sample.row",
    "sample.settings",
    "sample.seed",
    "sample.parts_at",
    "sample.entropy",
    "sample.logprob",
    "sample.distinct",
    "sample.repeated",
    "sample.loop",
    "sample.end",
)
_SETTING_COLUMNS = (
    "sample.settings",
    "sample.seeds",
    "sample.entropy",
    "sample.logprob",
    "sample.distinct_2",
    "sample.repeated",
    "sample.looping",
)
_LEFT = {"sample.settings", "sample.loop", "sample.end"}


def draw_report(report: "SampleReport") -> None:
    """The whole report."""
    named = {"model": report.model, "dtype": report.dtype, "rows": len(report.rows)}
    draw_heading(t("sample.title", **named))
    draw_notes(report.notes)
    out().print(line((_origin(report), "dim")))
    _draw_figures(report)
    draw_heading(t("sample.texts" if report.from_run is None else "sample.known_texts"))
    for place, row in enumerate(report.rows):
        _draw_row(place, row, report)
    # Of a re-rolled run each row is known up to another step: no means over them.
    if report.from_run is None and any(setting.seeds > 1 for setting in report.summary):
        _draw_settings(report.summary)
    if not report.complete:
        out().print(line((t("sample.incomplete"), "yellow")))


def tell_parquet(path: Path) -> None:
    """Say that the file was written."""
    err().print(line((t("sample.written", path=path), "dim")))


def _origin(report: "SampleReport") -> str:
    seconds = number(report.seconds, 2)
    if report.from_run is not None:
        return t("sample.rerolled", run=report.from_run, kept=report.kept_steps, seconds=seconds)
    return t("sample.decoded", prompt=report.prompt_tokens, most=report.max_new_tokens, seconds=seconds)


def _draw_figures(report: "SampleReport") -> None:
    """On a narrow terminal the settings stand beside the texts alone."""
    wide = out().width >= _WIDE
    table = _table(key for key in _ROW_COLUMNS if wide or key != "sample.settings")
    for place, row in enumerate(report.rows):
        table.add_row(*map(Text, (str(place), *[row.name] * wide, *_figures(row))))
    out().print(table)
    out().print(line("  ", (t("sample.how"), "dim")))


def _table(columns: Iterable[str]) -> Table:
    """A table in which words give way before figures do."""
    table = plain_table(columns, _LEFT)
    for column in table.columns:
        column.no_wrap = column.justify == "right"
    return table


def _figures(row: "SampleRow") -> Iterable[str]:
    yield _NONE if row.seed is None else str(row.seed)
    yield _NONE if row.parts_at is None else str(row.parts_at)
    for nats in (row.entropy_nats_mean, row.logprob_nats_mean):
        yield _NONE if nats is None else number(nats)
    shares = (row.distinct_1, row.distinct_2, row.distinct_3)
    yield " ".join(_NONE if share is None else number(share, 2) for share in shares)
    yield _NONE if row.repetition_rate is None else percent(row.repetition_rate)
    yield t("sample.looped", repeats=row.loop.repeats, period=row.loop.period) if row.loop else _NONE
    yield translate_or(f"finish.{row.finish_reason}", row.finish_reason) if row.finish_reason else _NONE


def _draw_row(place: int, row: "SampleRow", report: "SampleReport") -> None:
    """Its text, what it shares with the first row's dim, and why the two part."""
    bare = t("sample.no_stage" if row.seed is None else "sample.no_stage_draw")
    stages = " → ".join(f"{stage}={row.settings[stage]}" for stage in row.stages) or bare
    seed = () if row.seed is None else (f"  seed={row.seed}",)
    out().print(line((f"{place} ", "bold"), (row.name, "bold"), *seed, (f"  {stages}", "dim")))
    other = "sample.first_row" if report.from_run is None else "sample.the_run"
    compared = place and report.from_run is None
    shared = _beginning(row.text, report.rows[0].text) if compared else ""
    out().print(line("  ", (shared, "dim"), row.text.removeprefix(shared)))
    if row.parting:
        for sentence in parting_sentences(row.parting, t(other)):
            out().print(line("  ", (sentence, "cyan")))
    if row.exact_steps is not None:
        out().print(line("  ", (_exactness(row, report), "dim")))


def _beginning(text: str, other: str) -> str:
    """What two texts have in common at their beginnings."""
    return text[: common_length(text, other)]


def _exactness(row: "SampleRow", report: "SampleReport") -> str:
    if row.parts_at is not None:
        return t("sample.exact_until", steps=row.exact_steps)
    if row.finish_reason is not None:
        return t("sample.exact_whole", steps=row.exact_steps)
    return t("sample.exact_kept", steps=report.kept_steps)


def _draw_settings(summary: Iterable["SettingSummary"]) -> None:
    draw_heading(t("sample.over_seeds"))
    table = _table(_SETTING_COLUMNS)
    for setting in summary:
        nats = (_spread(setting.entropy_nats), _spread(setting.logprob_nats))
        shares = (_share_spread(setting.distinct_2), _share_spread(setting.repetition_rate))
        cells = (setting.name, str(setting.seeds), *nats, *shares, percent(setting.loop_share))
        table.add_row(*map(Text, cells))
    out().print(table)


def _spread(spread: "Spread | None") -> str:
    return f"{number(spread.mean)} ± {number(spread.std)}" if spread else _NONE


def _share_spread(spread: "Spread | None") -> str:
    return f"{percent(spread.mean)} ± {percent(spread.std)}" if spread else _NONE
