"""Drawing one step: what was chosen and how sure the model was, the candidates, cost, guards, the text so far."""

from rich.cells import cell_len
from rich.text import Text

from decodescope.cli.bars import bar
from decodescope.cli.console import line, out
from decodescope.cli.units import binary_bytes, count, figure, milliseconds, number, percent
from decodescope.locale import translate as t
from decodescope.trace.records import Candidate, Intervention, Stage, Step
from decodescope.visible import token_text, visible

SHOWN_CANDIDATES = 5
TOKEN_CELLS = 16
_BAR_CELLS = 20
_BESIDE_BAR = 60  # cells of a candidate's line that are not the bar
_TAIL_CELLS = 76


def draw_step(step: Step, recent: str, candidates: int = SHOWN_CANDIDATES) -> None:
    """One step in a compact block; `recent` is the end of the text so far."""
    draw_headline(step)
    for candidate in shown_candidates(step, candidates):
        out().print(_candidate_line(candidate, candidate.token_id == step.token_id, final=bool(step.stages)))
    if step.stages:
        out().print(Text("    " + " → ".join(map(_stage, step.stages)), "dim"), soft_wrap=False)
    draw_foot(step, recent)


def draw_headline(step: Step) -> None:
    """The token and how sure the model was of it."""
    marks = f" {t('run.step.forced')}" if step.forced else ""
    certainty = t("run.step.certainty", prob=percent(step.prob), rank=step.rank, entropy=number(step.entropy_nats))
    place = t("run.step.number", step=step.step)
    out().print(line((f"{place}  ", "dim"), (token_text(step.text), "bold"), f"{marks}  ", (certainty, "dim")))


def draw_foot(step: Step, recent: str) -> None:
    """What the step cost, what guards did about it, and the end of the text so far."""
    timing, kv = step.timing, step.kv
    cost = t(
        "run.step.cost",
        tokens=kv.tokens,
        bytes=binary_bytes(kv.used_bytes),
        forward=milliseconds(timing.forward_s),
        total=milliseconds(timing.total_s),
    )
    out().print(line(("    " + cost, "dim")))
    draw_interventions(step)
    out().print(line("    ", (_tail(recent), "green")))


def draw_interventions(step: Step) -> None:
    """What guards did after a step, a line each."""
    for each in step.interventions:
        out().print(line(("    ! " + _intervention(each), "yellow")))


def _intervention(done: Intervention) -> str:
    action = t(f"guard.action.{done.action}", temperature=done.temperature)
    unit = t("guard.unit.tokens") if done.guard == "loop" else t("guard.unit.nats")
    seen = {"measured": figure(done.measured, 4), "threshold": figure(done.threshold, 4), "unit": unit}
    return t("run.step.guard", guard=done.guard, action=action, **seen)


def _stage(stage: Stage) -> str:
    """A sampler stage in a few words: its setting, how many it left, and how much of the mass."""
    value = stage.settings.get(stage.name)
    return t("run.stage", name=stage.name, value=value, left=count(stage.survivors), mass=percent(stage.kept_mass))


def shown_candidates(step: Step, limit: int) -> list[Candidate]:
    """The first candidates, and the chosen one wherever it ranks."""
    first = [c for c in step.candidates if c.rank <= limit]
    return first + [c for c in step.candidates if c.rank > limit and c.token_id == step.token_id]


def _candidate_line(candidate: Candidate, chosen: bool, final: bool) -> Text:
    style = "bold green" if chosen else ""
    mark = "▶" if chosen else " "
    parts: list[str | tuple[str, str]] = [
        f"   {mark}",
        (f"{candidate.rank:>3} ", "dim"),
        (fitted(token_text(candidate.text), TOKEN_CELLS), style),
        (f"{candidate.token_id:>7} ", "dim"),
        f"{percent(candidate.prob_raw):>9} ",
        (_bar(candidate.prob_raw), "green" if chosen else "blue"),
    ]
    if final:
        gone = candidate.removed_by
        after = t("run.removed", stage=gone) if gone else t("run.final", prob=percent(candidate.prob_final))
        parts.append((f" {after}", "dim" if gone else ""))
    return line(*parts)


def _bar(share: float) -> str:
    """A bar as long as there is room for."""
    return bar(share, max(min(_BAR_CELLS, out().width - _BESIDE_BAR), 4))


def fitted(text: str, cells: int) -> str:
    """Cut or pad to a width in terminal cells; Chinese characters take two."""
    while cell_len(text) > cells:
        text = text[:-2] + "…"
    return text + " " * (cells - cell_len(text))


def _tail(text: str) -> str:
    """The end of a text, on one line."""
    shown = visible(text)
    start, cells = len(shown), 0
    while start and cells + cell_len(shown[start - 1]) < _TAIL_CELLS:
        start -= 1
        cells += cell_len(shown[start])
    return ("…" if start else "") + shown[start:]
