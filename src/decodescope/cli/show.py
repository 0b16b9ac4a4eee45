"""`decodescope show` and `export`: saved runs, drawn again or taken along. No torch."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from decodescope.analysis.metrics import RECENT_CHARACTERS, recent_text
from decodescope.cli import options as o
from decodescope.cli.console import line, out
from decodescope.cli.run_view import SHOWN_CANDIDATES, draw_header, draw_step, draw_summary
from decodescope.cli.units import percent
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.export import export_jsonl
from decodescope.trace.records import Step, Trace
from decodescope.trace.store import read_trace
from decodescope.visible import token_text

Folder = Annotated[Path, typer.Argument(help=t("help.folder"), show_default=False, metavar="DIR")]
StepNumber = Annotated[
    int | None, typer.Option("--step", help=t("help.show.step"), metavar="N", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help=t("help.show.all"), show_default=False)]
To = Annotated[str, typer.Option("--to", help=t("help.export.to"), metavar="jsonl")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help=t("help.export.output"), metavar="FILE", show_default=False)
]


def show(
    folder: Folder,
    step: StepNumber = None,
    all: All = False,
    candidates: o.Candidates = None,
    json: o.Json = False,
    lang: o.Lang = None,
) -> None:
    trace = read_trace(folder)
    path = trace.path()
    if json:
        export_jsonl(trace if all else replace(trace, steps=path), sys.stdout)
        return
    if step is not None and not 0 <= step < len(path):
        raise InputError("show.no_step", step=step, count=len(path))
    limit = SHOWN_CANDIDATES if candidates is None else candidates
    if limit < 1:
        raise InputError("run.candidates", value=limit)
    if step is not None:
        draw_step(path[step], recent_text(path[: step + 1]), limit)
    elif all:
        _draw_tree(trace)
    else:
        draw_header(trace.run)
        recent = ""
        for one in path:
            recent = (recent + one.delta_text)[-RECENT_CHARACTERS:]
            draw_step(one, recent, limit)
        if trace.end:
            draw_summary(trace.run, path, trace.end)


show.__doc__ = t("help.show")


def export(folder: Folder, to: To = "jsonl", output: Output = None, lang: o.Lang = None) -> None:
    if to != "jsonl":
        raise InputError("export.unknown", name=to, known="jsonl")
    trace = read_trace(folder)
    if output is None:
        export_jsonl(trace, sys.stdout)
        return
    if output.resolve().is_relative_to(folder.resolve()):
        raise InputError("export.inside", path=output)
    try:
        with output.open("w", encoding="utf-8") as stream:
            export_jsonl(trace, stream)
    except OSError as fault:
        raise InputError("export.cannot_write", path=output, reason=fault.strerror or fault) from None


export.__doc__ = t("help.export")


def _draw_tree(trace: Trace) -> None:
    """Every branch of the run, indented where it parts."""
    children: dict[int | None, list[Step]] = {}
    for step in trace.steps:
        children.setdefault(step.parent, []).append(step)
    pending = [(step, 0) for step in reversed(children.get(None, []))]
    while pending:
        step, depth = pending.pop()
        mark = f" {t('run.step.forced')}" if step.forced else ""
        text = f"{'  ' * depth}{step.step:>3} {token_text(step.text)} {percent(step.prob)}{mark}"
        out().print(line(text))
        below = children.get(step.node, [])
        deeper = depth + (len(below) > 1)
        pending += [(child, deeper) for child in reversed(below)]
