"""`run --step` and `--break`: pauses between tokens, in which the reader looks, picks, types, goes back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from decodescope.analysis.breaks import BreakRule, Breaks
from decodescope.analysis.repeats import find_loop
from decodescope.cli.console import asked, line, out
from decodescope.cli.forward_verdict import place
from decodescope.cli.units import number
from decodescope.errors import FindingError, InputError
from decodescope.locale import translate as t
from decodescope.trace.records import Step
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.live import LiveRun
    from decodescope.observe.recording import Recording
    from decodescope.session import Session

# What a fault inside a layer shows in; the sites between them hold no fault that these would not show.
_WATCHED = ("embed", "layers.*.attn_out", "layers.*.mlp_out", "layers.*.resid_post", "final_norm", "logits")
_HELP = ("next", "rank", "id", "text", "back", "run_on", "quit")

Draw = Callable[[Step, str], None]  # a step and the end of the text so far


@contextmanager
def looking(session: "Session", rules: Sequence[BreakRule]) -> Iterator["Recording | None"]:
    """Watch inner values of the next run where a rule asks for non-finite ones. Raises FindingError that names
    the first of them where the run ended in another FindingError."""
    if not any(rule.name == "nonfinite" for rule in rules):
        yield None
        return
    from decodescope.observe.recording import Watch

    with session.watching(Watch(summarise=_WATCHED)) as recording:
        try:
            yield recording
        except FindingError as finding:
            first = recording.first_nonfinite
            if first is None:
                raise
            where = {"site": place(first), "position": first.position, "value": first.value}
            raise FindingError("step.nonfinite", step=first.step, **where) from finding


class Stepper:
    """Asks what to do: after each step, or only where a break condition is met."""

    def __init__(
        self, session: "Session", rules: Sequence[BreakRule], pausing: bool, recording: "Recording | None" = None
    ) -> None:
        self._session, self._recording = session, recording
        self._breaks = Breaks(rules)
        self._running = not pausing  # to the next break
        self._typed = 0  # tokens of the reader's own text that are still to come

    def pause(self, live: "LiveRun", step: Step, draw: Draw) -> bool:
        """Let the reader look, change or go back, until they want the next token; False to quit."""
        if self._typed:
            self._typed -= 1
            if self._typed:
                return True
        met = self._met(live)
        if met is not None:
            value = self._value(met, live)
            said = t("step.paused", step=step.step, condition=met.written, value=value)
            out().print(line((said, "bold yellow")))
        elif self._running:
            return True
        self._running = False
        return self._converse(live, step, draw)

    def _converse(self, live: "LiveRun", step: Step, draw: Draw) -> bool:
        while True:
            answer = asked(t("step.prompt") + " ")
            command = "q" if answer is None else answer.strip().lower()
            if command in ("", "c", "q"):
                self._running = command == "c"
                return command != "q"
            changed = self._changed(live, step, (answer or "").lstrip())
            if changed is None:
                continue
            step = changed
            draw(step, live.recent_text())
            if self._typed:
                return True

    def _changed(self, live: "LiveRun", step: Step, answer: str) -> Step | None:
        """The step that stands here after an answer; None where the answer changed nothing, and why was said."""
        command = answer.strip().lower()
        if command == "b" and step.step > 0:
            return live.back()
        if command == "b":
            out().print(t("step.at_first"))
        elif command == "?":
            _draw_help()
        else:
            try:
                ids = self._ids(answer, step)
            except InputError as fault:
                out().print(line((str(fault), "yellow")))
                return None
            return self._laid(live, step, ids) if ids else None
        return None

    def _ids(self, answer: str, step: Step) -> Sequence[int]:
        """The tokens that an answer names; none where it names none, and that was said. Raises InputError."""
        if answer.startswith("="):
            return self._of_text(answer[1:])
        command = answer.strip()
        if command.startswith("#") and command[1:].isdecimal():
            return [self._session.token_id(int(command[1:]))]
        ranks = {str(candidate.rank): candidate.token_id for candidate in step.candidates}
        if command not in ranks:
            # The last one may be the chosen token, of whatever rank.
            known = [each.rank for place, each in enumerate(step.candidates, start=1) if each.rank == place]
            out().print(t("step.what", ranks=max(known, default=0)))
            return []
        return [ranks[command]]

    def _of_text(self, text: str) -> Sequence[int]:
        tokenizer = self._session.tokenizer
        ids = tokenizer.continuation(text) if text else []
        if ids:
            tokens = " ".join(f"{token_text(tokenizer.token_text(each))}({each})" for each in ids)
            out().print(line((t("step.typed", count=len(ids), tokens=tokens), "cyan")))
        else:
            out().print(t("step.no_text"))
        return ids

    def _laid(self, live: "LiveRun", step: Step, ids: Sequence[int]) -> Step:
        """Put the first token here, and the others where the next ones will be."""
        first, *rest = ids
        if first != step.token_id:
            step = live.replace(first)
        live.force(rest)
        self._typed = len(rest)
        return step

    def _met(self, live: "LiveRun") -> BreakRule | None:
        path = live.traces[0].path()
        first = self._recording.first_nonfinite if self._recording else None
        return self._breaks.met(path, nonfinite=first is not None and first.step == path[-1].step)

    def _value(self, rule: BreakRule, live: "LiveRun") -> str:
        """What was seen where a condition was met."""
        path = live.traces[0].path()
        step = path[-1]
        match rule.name:
            case "entropy":
                return t("step.value.entropy", value=number(step.entropy_nats))
            case "rank":
                return t("step.value.rank", value=step.rank)
            case "margin":
                return t("step.value.margin", value=number(step.margin_logits))
            case "loop" if loop := find_loop([each.token_id for each in path], [each.text for each in path]):
                return t("step.value.loop", period=loop.period, repeats=loop.repeats)
            case "nonfinite" if self._recording and (first := self._recording.first_nonfinite):
                return t("step.value.nonfinite", value=first.value, site=place(first), position=first.position)
        return t("step.value.token", text=token_text(step.text), id=step.token_id)


def _draw_help() -> None:
    for name in _HELP:
        out().print(line("  ", t(f"step.help.{name}")))
