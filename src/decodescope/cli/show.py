"""`decodescope show` and `export`: saved runs, drawn again or taken along. No torch."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from decodescope.analysis.metrics import RECENT_CHARACTERS, recent_text
from decodescope.cli import options as o
from decodescope.cli.console import line, out
from decodescope.cli.run_view import draw_header, draw_summary
from decodescope.cli.step_view import SHOWN_CANDIDATES
from decodescope.cli.tree_view import draw_tree
from decodescope.cli.waterfall import step_drawing
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.export import export_jsonl
from decodescope.trace.saved import read_trace

Folder = Annotated[Path, typer.Argument(help=t("help.folder"), show_default=False, metavar="DIR")]
StepNumber = Annotated[
    int | None, typer.Option("--step", help=t("help.show.step"), metavar="N", show_default=False)
]
BranchNumber = Annotated[
    int | None, typer.Option("--branch", help=t("help.show.branch"), metavar="N", show_default=False)
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
    branch: BranchNumber = None,
    candidates: o.Candidates = None,
    stages: o.Stages = False,
    json: o.Json = False,
    lang: o.Lang = None,
) -> None:
    whole = read_trace(folder)
    trace = whole if branch is None else whole.branch(branch)
    path = trace.path()
    if json:
        export_jsonl(whole if all else replace(trace, steps=path, branches=[]), sys.stdout)
        return
    if step is not None and not 0 <= step < len(path):
        raise InputError("show.no_step", step=step, count=len(path))
    limit = SHOWN_CANDIDATES if candidates is None else candidates
    if limit < 1:
        raise InputError("run.candidates", value=limit)
    draw = step_drawing(trace.run, limit, stages)
    if step is not None:
        draw(path[step], recent_text(path[: step + 1]))
    elif all:
        draw_tree(whole)
    else:
        draw_header(trace.run)
        recent = ""
        for one in path:
            recent = (recent + one.delta_text)[-RECENT_CHARACTERS:]
            draw(one, recent)
        if trace.end:
            draw_summary(trace.run, path, trace.end)
        if trace.branches:
            out().print(line((t("show.branches", count=len(trace.branches)), "dim")))


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
