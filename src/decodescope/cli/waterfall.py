"""The waterfall of a step: what every sampling stage left, the candidates after each, and where the draw fell."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from decodescope.analysis.metrics import drawn_stretch
from decodescope.cli.bars import stretch
from decodescope.cli.console import line, out
from decodescope.cli.step_view import (
    TOKEN_CELLS,
    draw_foot,
    draw_headline,
    draw_step,
    fitted,
    shown_candidates,
)
from decodescope.cli.tables import plain_table
from decodescope.cli.units import count, number, percent
from decodescope.locale import translate as t
from decodescope.trace.records import Candidate, Run, Stage, Step
from decodescope.visible import token_text

_BAR_CELLS = 60
_GONE = "–"


def step_drawing(run: Run, candidates: int, stages: bool) -> Callable[[Step, str], None]:
    """How a step and the end of the text so far are drawn: with all its stages, or as `draw_step` has it."""
    if stages:
        return lambda step, recent: _draw_stages(run, step, recent, candidates)
    return lambda step, recent: draw_step(step, recent, candidates)


def _draw_stages(run: Run, step: Step, recent: str, candidates: int) -> None:
    draw_headline(step)
    draw_waterfall(run, step, candidates)
    draw_foot(step, recent)


def draw_waterfall(run: Run, step: Step, candidates: int) -> None:
    """The stages in their order, the candidates after each, and the draw."""
    shown = shown_candidates(step, candidates)
    _print(_stage_table(run, step, shown))
    if not step.stages:
        out().print(line("    ", (t("waterfall.none"), "dim")))
    elif not _recorded(step):
        out().print(line("    ", (t("waterfall.not_recorded"), "yellow")))
    _print(_candidate_table(step, shown))
    _draw_choice(run, step)


def _print(table: Table) -> None:
    out().print(Padding(table, (0, 0, 0, 4), expand=False), soft_wrap=False)


def _recorded(step: Step) -> bool:
    """Whether the candidates' probabilities after every stage are there."""
    return all(stage.probs for stage in step.stages)


def _stage_table(run: Run, step: Step, shown: Sequence[Candidate]) -> Table:
    table = plain_table(("waterfall.stage", "waterfall.survivors", "waterfall.mass", "waterfall.entropy"))
    table.columns[0].justify = "left"
    table.add_column(t("waterfall.removes"), overflow="ellipsis")
    raw = Text(t("waterfall.raw"), "bold"), Text(count(run.vocabulary)), Text(""), Text(number(step.entropy_nats))
    table.add_row(*raw)
    survivors = [run.vocabulary, *(stage.survivors for stage in step.stages)]
    for place, (stage, left) in enumerate(zip(step.stages, pairwise(survivors), strict=True), start=1):
        before, after = map(count, left)
        table.add_row(
            Text(f"{place} {_named(stage)}"),
            Text(t("waterfall.left", before=before, after=after)),
            Text(percent(stage.kept_mass)),
            Text(number(stage.entropy_nats)),
            Text(" ".join(token_text(c.text) for c in shown if c.removed_by == stage.name), "red"),
        )
    return table


def _named(stage: Stage) -> str:
    """The stage with its settings; one that is called like the stage is only told by its value."""
    told = (str(value) if name == stage.name else f"{name}={value}" for name, value in stage.settings.items())
    return " ".join((stage.name, *told))


def _candidate_table(step: Step, shown: Sequence[Candidate]) -> Table:
    """A row a candidate: raw, after each stage but the last, and final, which is after the last."""
    stages = step.stages[:-1] if _recorded(step) else ()
    table = plain_table()
    table.add_column("")
    table.add_column(t("waterfall.candidate"), overflow="ellipsis")
    table.add_column(t("waterfall.raw"), justify="right", no_wrap=True)
    for place, _ in enumerate(stages, start=1):
        table.add_column(str(place), justify="right", no_wrap=True)
    table.add_column(t("waterfall.final"), justify="right", no_wrap=True)
    for candidate in shown:
        place = step.candidates.index(candidate)
        chosen = candidate.token_id == step.token_id
        probs = [candidate.prob_raw, *(stage.probs[place] for stage in stages), candidate.prob_final]
        name = fitted(token_text(candidate.text), TOKEN_CELLS)
        mark = f"▶{candidate.rank:>3}" if chosen else f" {candidate.rank:>3}"
        table.add_row(Text(mark), Text(name), *_figures(probs), style="bold green" if chosen else "")
    return table


def _figures(probs: Iterable[float]) -> Iterable[Text]:
    for prob in probs:
        yield Text(percent(prob).removesuffix(" %")) if prob else Text(_GONE, "dim")


def _draw_choice(run: Run, step: Step) -> None:
    """Where the draw fell on the cumulative bar; greedy and forced steps say that there was none."""
    told = {"token": token_text(step.text), "prob": percent(step.prob_final)}
    fell = drawn_stretch(step)
    if fell is not None:
        cells = min(_BAR_CELLS, out().width - 8)
        out().print(line("    ", ("│", "dim"), (stretch(*fell, cells), "green"), ("│", "dim")))
        start, stop = map(percent, fell)
        said = t("waterfall.draw", token=told["token"], start=start, stop=stop)
    elif step.forced:
        said = t("waterfall.forced", **told)
    elif any(setting.name == "temperature" and setting.value for setting in run.settings):
        said = t("waterfall.no_draw", **told)
    else:
        said = t("waterfall.greedy", **told)
    out().print(line("    ", said))
