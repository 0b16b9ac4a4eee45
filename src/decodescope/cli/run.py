"""`decodescope run`: watch a model choose every token."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport, line, out
from decodescope.cli.run_view import (
    SHOWN_CANDIDATES,
    content_text,
    draw_header,
    draw_ids,
    draw_model,
    draw_settings,
    draw_step,
    draw_summary,
)
from decodescope.cli.stepping import Stepper
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.lines import json_text, record_line
from decodescope.trace.records import Step, Trace
from decodescope.trace.store import refuse_used
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.live import LiveRun
    from decodescope.options import RunOptions
    from decodescope.session import Prompts, Session


def run(
    prompt: Annotated[str | None, o.prompt_argument("run.prompt")] = None,
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    messages: o.Messages = None,
    prompts: o.Prompts = None,
    max_new_tokens: o.MaxNewTokens = 128,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    no_repeat_ngram_size: o.NoRepeatNgramSize = None,
    seed: o.Seed = None,
    checkpoint_settings: o.CheckpointSettings = False,
    candidates: o.Candidates = None,
    step: o.StepByStep = False,
    no_cache: o.NoCache = False,
    save: o.Save = None,
    keep: o.Keep = None,
    json: o.Json = False,
    dtype: o.Dtype = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    engine: o.Engine = "native",
    lang: o.Lang = None,
) -> None:
    given = dict(locals())
    _check(given)
    from decodescope.session import Session

    run_options = _run_options(given)
    with StderrReport() as report:
        session = Session.open(
            model, dtype=dtype, device=device, threads=threads, report=report, progress=report.loading
        )
    ready = _ready_prompts(session, given)
    if prompts is not None and save is not None and len(ready) == 1:
        run_options = replace(run_options, save=save / "0000")  # the layout of a batch does not hang on its size
    view = View(json, step, candidates or SHOWN_CANDIDATES, batch=prompts is not None)
    with StderrReport() as report:
        _follow(session.start(ready, run_options, progress=report.reading), view)


run.__doc__ = t("help.run")


def _check(given: dict[str, Any]) -> None:
    """What can be refused before the model is loaded."""
    sources = [name for name in ("prompt", "messages", "prompts") if given[name] is not None]
    if len(sources) != 1:
        raise InputError("run.one_prompt", count=len(sources))
    if given["engine"] != "native":
        raise InputError("engine.unknown", name=given["engine"])
    if given["keep"] not in (None, "logits"):
        raise InputError("run.keep", value=given["keep"])
    if given["step"] and (given["prompts"] or given["json"]):
        raise InputError("run.step_alone")
    if given["messages"] and given["chat"] is False:
        raise InputError("run.raw_messages")
    if given["save"]:
        refuse_used(given["save"])
    if given["prompt"] is not None:
        given["prompt"] = read_prompt(given["prompt"])


def _run_options(given: dict[str, Any]) -> "RunOptions":
    from decodescope.options import DEFAULT_CANDIDATES, RunOptions

    return RunOptions(
        sampling={name: given[name] for name in o.SAMPLING},
        checkpoint_settings=given["checkpoint_settings"],
        max_new_tokens=given["max_new_tokens"],
        stop=tuple(given["stop"] or ()),
        ignore_eos=given["ignore_eos"],
        use_cache=not given["no_cache"],
        candidates=DEFAULT_CANDIDATES if given["candidates"] is None else given["candidates"],
        save=given["save"],
        keep_logits=given["keep"] == "logits",
    )


def _ready_prompts(session: "Session", given: dict[str, Any]) -> "Prompts":
    if given["prompts"] is not None:
        return session.prompts_from(given["prompts"], chat=given["chat"], system=given["system"])
    if given["messages"] is not None:
        return [session.conversation_from(given["messages"], system=given["system"])]
    return [session.prompt(given["prompt"], chat=given["chat"], system=given["system"])]


def read_prompt(argument: str) -> str:
    """The prompt on the command line, or standard input for `-`; InputError where it is empty or not UTF-8."""
    if argument == "-" and sys.stdin is None:
        raise InputError("prompt.no_stdin")
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n") if argument == "-" else argument
        text.encode("utf-8")
    except UnicodeError:
        raise InputError("prompt.not_utf8") from None
    if not text:
        raise InputError("text.empty_prompt")
    return text


class View:
    """Where the steps go: JSON lines, blocks on the terminal, or one line a step for a batch."""

    def __init__(self, json: bool, stepping: bool, candidates: int, batch: bool) -> None:
        self.json, self.batch, self.candidates = json, batch, candidates
        self.stepper = Stepper(candidates) if stepping else None

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
        if self.json:
            self._line(step, row)
        elif self.batch:
            out().print(t("run.row_step", row=row, step=step.step, token=token_text(step.text), prob=step.prob))
        else:
            draw_step(step, live.recent_text(row), self.candidates)

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


def _follow(live: "LiveRun", view: View) -> None:
    """Show every step as it comes. Whatever ends the run, its end is written and shown."""
    view.begin(live.traces)
    try:
        for row, step in live.steps():
            view.step(row, step, live)
            if view.stepper and not view.stepper.pause(live, step):
                break
    finally:
        live.finish("interrupted")  # says nothing where the rows have ended
        view.end(live.traces)
