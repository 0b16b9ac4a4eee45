"""Drawing what came of a fork: the tree, the branches in figures, what they cost, whether a prefill agrees."""

from typing import TYPE_CHECKING

from rich.text import Text

from decodescope.cli.console import line, out
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.tree_view import draw_tree
from decodescope.cli.units import binary_bytes, figure, milliseconds, number
from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.trace.records import Trace
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.experiments.fork_records import ForkedBranch, ForkReport

_COLUMNS = (
    "fork.column.branch",
    "fork.column.first",
    "fork.column.parts",
    "fork.column.tokens",
    "fork.column.own",
    "fork.column.whole",
    "fork.column.ttft",
    "fork.column.speed",
    "fork.column.finish",
)
_LEFT = ("fork.column.first", "fork.column.finish")


def draw_forks(report: "ForkReport", trace: Trace) -> None:
    """The whole report, under the tree of the run that it belongs to."""
    out().print(line((t("fork.title", model=report.model, step=report.step, dtype=report.dtype), "bold")))
    if report.settings:
        told = " · ".join(f"{setting.name}={setting.value}" for setting in report.settings)
        out().print(line(t("fork.settings", settings=told)))
    out().print()
    draw_tree(trace)
    out().print()
    _draw_branches(report)
    out().print(line(_cost(report)))
    for branch in report.branches:
        _draw_check(branch)
    if report.trace is not None:
        out().print(line((t("fork.kept", folder=report.trace), "dim")))


def _draw_branches(report: "ForkReport") -> None:
    draw_heading(t("fork.branches"))
    table = plain_table(_COLUMNS, left=_LEFT)
    for branch in report.branches:
        table.add_row(*_cells(branch))
    out().print(table, soft_wrap=False)


def _cells(branch: "ForkedBranch") -> tuple[Text, ...]:
    first = f"{token_text(branch.tokens[0].text)} ({branch.tokens[0].token_id})" if branch.tokens else "-"
    speed = branch.decode_tokens_per_s
    values = (
        str(branch.number),
        first,
        "-" if branch.parts_at is None else str(branch.parts_at),
        str(len(branch.tokens)),
        number(branch.own_logprob_nats, 2),
        number(branch.logprob_nats, 2),
        "-" if branch.ttft_s is None else milliseconds(branch.ttft_s),
        "-" if speed is None else number(speed, 1),
        translate_or(f"finish.{branch.finish_reason}", branch.finish_reason),
    )
    return tuple(map(line, values))


def _cost(report: "ForkReport") -> str:
    return t(
        "fork.cost",
        seconds=number(report.seconds, 2),
        past=report.past_tokens,
        reused=report.reused_tokens,
        shared=binary_bytes(report.shared_bytes),
        added=binary_bytes(report.added_bytes),
    )


def _draw_check(branch: "ForkedBranch") -> None:
    """What a fresh prefill says of a branch."""
    check = branch.verification
    if check is None:
        return
    said = t(
        "fork.agrees" if check.agrees else "fork.does_not_agree",
        number=branch.number,
        compared=check.compared,
        difference=figure(check.largest_difference, 2),
        tolerance=figure(check.tolerance, 2),
    )
    out().print(line((said, "green" if check.agrees else "bold red")))
    if check.best_differs_at:
        steps = ", ".join(map(str, check.best_differs_at))
        out().print(line((t("fork.best_differs", number=branch.number, steps=steps), "yellow")))
