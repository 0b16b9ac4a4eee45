"""A run on its way: every step shown as it comes, as a JSON line, a block on the terminal, or a line a row."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodescope.cli.console import err, line, out
from decodescope.cli.run_view import content_text, draw_header, draw_ids, draw_model, draw_settings, draw_summary
from decodescope.cli.step_view import draw_interventions
from decodescope.cli.waterfall import draw_waterfall, step_drawing
from decodescope.locale import translate as t
from decodescope.trace.lines import json_text, record_line
from decodescope.trace.records import Step, Trace
from decodescope.trace.saved import saved_tensors
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.cli.stepping import Stepper
    from decodescope.live import LiveRun


@dataclass(slots=True)
class View:
    """How a run is shown."""

    json: bool
    batch: bool
    candidates: int
    stages: bool
    stepper: "Stepper | None" = None

    def begin(self, traces: list[Trace]) -> None:
        if self.batch and not self.json:
            draw_model(traces[0].run)
        for row, trace in enumerate(traces):
            if self.json:
                self._line(trace.run, row)
            elif self.batch:
                out().print(line((t("run.row", row=row, text=content_text(trace.run)), "bold")))
                draw_settings(trace.run)
                draw_ids(trace.run)
            else:
                draw_header(trace.run)

    def step(self, row: int, step: Step, live: "LiveRun") -> None:
        run = live.traces[row].run
        if self.json:
            self._line(step, row)
        elif self.batch:
            out().print(t("run.row_step", row=row, step=step.step, token=token_text(step.text), prob=step.prob))
            if self.stages:
                draw_waterfall(run, step, self.candidates)
            draw_interventions(step)
        else:
            step_drawing(run, self.candidates, self.stages)(step, live.recent_text(row))

    def goes_on(self, step: Step, live: "LiveRun") -> bool:
        """Whether the reader, where there is one to be asked, wants more."""
        if self.stepper is None:
            return True
        return self.stepper.pause(live, step, step_drawing(live.traces[0].run, self.candidates, self.stages))

    def end(self, traces: list[Trace]) -> None:
        for row, trace in enumerate(traces):
            if trace.end is None:
                continue
            if self.json:
                self._line(trace.end, row)
            else:
                if self.batch:
                    out().rule(f"{row}", align="left")
                draw_summary(trace.run, trace.path(), trace.end)

    def _line(self, record: Any, row: int) -> None:
        fields = record_line(record)
        print(json_text({**fields, "row": row} if self.batch else fields), flush=True)


def follow(live: "LiveRun", view: View) -> None:
    """Show every step as it comes. Whatever ends the run, its end is written and shown."""
    view.begin(live.traces)
    try:
        for row, step in live.steps():
            view.step(row, step, live)
            if not view.goes_on(step, live):
                break
    finally:
        live.finish("interrupted")  # says nothing where the rows have ended
        view.end(live.traces)


def tell_missing_logits(traces: list[Trace]) -> None:
    """Say so where a run was to keep logits and had no room for any; the summary tells of those that kept some."""
    for trace in traces:
        if trace.end and trace.end.trace and not saved_tensors(Path(trace.end.trace)):
            err().print(line((t("run.no_logits"), "yellow")))
