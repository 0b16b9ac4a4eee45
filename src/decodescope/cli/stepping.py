"""`run --step`: a pause after every token. Enter goes on, a number picks that candidate, b goes back, q quits."""

from typing import TYPE_CHECKING

from decodescope.cli.console import out
from decodescope.cli.run_view import draw_step
from decodescope.locale import translate as t
from decodescope.trace.records import Step

if TYPE_CHECKING:
    from decodescope.live import LiveRun


class Stepper:
    """Asks after each step what to do."""

    def __init__(self, candidates: int) -> None:
        self._candidates = candidates

    def pause(self, live: "LiveRun", step: Step) -> bool:
        """Let the reader look, change or go back, until they want the next token; False to quit."""
        while True:
            answer = self._ask()
            if answer == "":
                return True
            if answer == "q":
                return False
            if answer == "b" and step.step == 0:
                out().print(t("step.at_first"))
                continue
            if answer == "b":
                step = live.back()
                self._draw(live, step)
                continue
            token_id = self._picked(answer, step)
            if token_id is None:
                out().print(t("step.what", ranks=len(step.candidates)))
                continue
            if token_id != step.token_id:
                step = live.replace(token_id)
            self._draw(live, step)

    def _ask(self) -> str:
        try:
            return input(t("step.prompt") + " ").strip().lower()
        except (EOFError, RuntimeError):  # the input has ended, or was closed from the start
            return "q"

    def _picked(self, answer: str, step: Step) -> int | None:
        ranks = {str(candidate.rank): candidate.token_id for candidate in step.candidates}
        return ranks.get(answer)

    def _draw(self, live: "LiveRun", step: Step) -> None:
        draw_step(step, live.recent_text(), self._candidates)
