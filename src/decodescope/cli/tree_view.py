"""Drawing the tree of a run: a line for each stretch without a parting, branches that leave it indented below."""

from rich.table import Table
from rich.text import Text

from decodescope.analysis.tree import THE_RUN, Ending, Stretch, stretches
from decodescope.cli.console import line, out
from decodescope.cli.run_view import finish_text
from decodescope.cli.tables import draw_heading
from decodescope.cli.units import number, percent
from decodescope.locale import translate as t
from decodescope.trace.records import Trace
from decodescope.visible import token_text, visible

_DEEPEST = 12  # indents; deeper branches say how deep they are
_KEPT, _OTHER, _BY_HAND = "▶", "├", "✎"


def draw_tree(trace: Trace) -> None:
    """Every branch of a run; the one that was kept is marked."""
    draw_heading(t("tree.title", count=len(trace.branches)))
    out().print(line((t("tree.how"), "dim")))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 0, 0, 2))
    table.add_column(t("tree.column.steps"), no_wrap=True)
    table.add_column(t("tree.column.text"), ratio=1, overflow="fold")
    for key in ("tree.column.prob", "tree.column.logprob"):
        table.add_column(t(key), justify="right", no_wrap=True)
    table.add_column(t("tree.column.end"), overflow="fold", max_width=30)
    for stretch in stretches(trace):
        prob = percent(stretch.steps[0].prob) if stretch.parted else ""
        total = number(stretch.logprob_nats, 2) if stretch.steps else ""
        table.add_row(_place(stretch), _text(stretch), prob, total, _end(stretch))
    out().print(table, soft_wrap=False)


def _place(stretch: Stretch) -> Text:
    """How deep, whether kept, and which steps."""
    indent = "  " * min(stretch.depth, _DEEPEST) + (f"{stretch.depth} " if stretch.depth > _DEEPEST else "")
    numbers = [step.step for step in stretch.steps]
    steps = "" if not numbers else f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    mark = (_KEPT, "bold green") if stretch.kept else (_OTHER, "dim")
    return line(indent, mark, (f" {steps}", "dim"))


def _text(stretch: Stretch) -> Text:
    """The text of the steps; where branches part their first token stands out."""
    if not stretch.steps:
        return Text("")
    first, rest = stretch.steps[0], "".join(step.delta_text for step in stretch.steps[1:])
    if not stretch.parted:
        return Text(visible(first.delta_text + rest))
    shown = (token_text(first.text), "bold green" if stretch.kept else "bold cyan")
    return Text.assemble((_BY_HAND if first.forced else "", "dim"), shown, " ", visible(rest))


def _end(stretch: Stretch) -> Text:
    """Which branches end here, and why; a token that was left for another one ends no branch."""
    said = [_ending(ending) for ending in stretch.endings]
    if stretch.is_leaf and not said:
        return Text(t("tree.left"), "dim")
    return Text(visible("; ".join(said)))


def _ending(ending: Ending) -> str:
    if ending.number == THE_RUN:
        return t("tree.run_ends", reason=finish_text(ending.end))
    return t("tree.branch_ends", number=ending.number, reason=finish_text(ending.end))
