"""`decodescope run`: watch a model choose every token."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport
from decodescope.cli.follow import View, follow, tell_missing_logits
from decodescope.cli.step_view import SHOWN_CANDIDATES
from decodescope.cli.units import budget_bytes
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.folder import refuse_used

if TYPE_CHECKING:
    from decodescope.analysis.breaks import BreakRule
    from decodescope.live import LiveRun
    from decodescope.open_model import Prompts
    from decodescope.options import RunOptions
    from decodescope.session import Session

MetricsTextfile = Annotated[Path | None, o.option("run.metrics_textfile", "--metrics-textfile", metavar="FILE")]


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
    sampler: o.Sampler = None,
    without: o.Without = None,
    penalty_window: o.PenaltyWindow = None,
    guard: o.Guard = None,
    checkpoint_settings: o.CheckpointSettings = False,
    candidates: o.Candidates = None,
    stages: o.Stages = False,
    step: o.StepByStep = False,
    break_: o.Break = None,
    chat_loop: o.ChatLoop = False,
    no_cache: o.NoCache = False,
    save: o.Save = None,
    keep: o.Keep = None,
    keep_budget: o.KeepBudget = "1GiB",
    metrics_textfile: MetricsTextfile = None,
    json: o.Json = False,
    dtype: o.Dtype = None,
    quantize: o.Quantize = "none",
    cache_dtype: o.CacheDtype = None,
    random_weights: o.RandomWeights = None,
    layers_on_disk: o.LayersOnDisk = "0",
    max_memory: o.MaxMemory = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    engine: o.Engine = "native",
    lang: o.Lang = None,
) -> None:
    given = dict(locals())
    _check(given)
    from decodescope.session import Session

    rules, run_options = _breaks(given), _run_options(given)
    with StderrReport() as report:
        session = Session.open(model, report=report, progress=report.loading, **o.loading_of(given))
    if chat_loop:
        from decodescope.cli.chat_loop import talk

        talk(session, run_options, prompt=given["prompt"], system=system, json=json)
    else:
        _watch(session, run_options, rules, given)


run.__doc__ = t("help.run")


def _check(given: dict[str, Any]) -> None:
    """What can be refused before the model is loaded."""
    sources = [name for name in ("prompt", "messages", "prompts") if given[name] is not None]
    if given["chat_loop"]:
        _check_chat_loop(given)
    elif len(sources) != 1:
        raise InputError("run.one_prompt", count=len(sources))
    if given["engine"] != "native":
        raise InputError("engine.unknown", name=given["engine"])
    if given["keep"] not in (None, "logits"):
        raise InputError("run.keep", value=given["keep"])
    if (given["step"] or given["break_"]) and (given["prompts"] or given["json"]):
        raise InputError("run.step_alone")
    if given["messages"] and given["chat"] is False:
        raise InputError("run.raw_messages")
    if given["save"]:
        refuse_used(given["save"])
    if given["metrics_textfile"]:
        from decodescope.monitor.textfile import check_textfile

        check_textfile(given["metrics_textfile"])
    if given["prompt"] is not None:
        given["prompt"] = read_prompt(given["prompt"])


def _check_chat_loop(given: dict[str, Any]) -> None:
    others = ("step", "break_", "stages", "prompts", "messages", "metrics_textfile")
    if given["chat"] is False or any(given[name] for name in others):
        raise InputError("run.chat_loop_alone")


def _breaks(given: dict[str, Any]) -> "list[BreakRule]":
    from decodescope.analysis.breaks import parse_break

    return [parse_break(text) for text in given["break_"] or ()]


def _run_options(given: dict[str, Any]) -> "RunOptions":
    from decodescope.options import DEFAULT_CANDIDATES, RunOptions

    return RunOptions(
        sampling=o.sampling_of(given),
        checkpoint_settings=given["checkpoint_settings"],
        max_new_tokens=given["max_new_tokens"],
        stop=tuple(given["stop"] or ()),
        ignore_eos=given["ignore_eos"],
        use_cache=not given["no_cache"],
        candidates=DEFAULT_CANDIDATES if given["candidates"] is None else given["candidates"],
        save=given["save"],
        guards=tuple(given["guard"] or ()),
        keep_logits=given["keep"] == "logits",
        logits_bytes=budget_bytes(given["keep_budget"]),
        stage_probs=given["stages"],
    )


def _watch(session: "Session", run_options: "RunOptions", rules: "list[BreakRule]", given: dict[str, Any]) -> None:
    """Run what was asked for and show it on its way."""
    from decodescope.cli.stepping import Stepper, looking

    ready, batch = _ready_prompts(session, given), given["prompts"] is not None
    if batch and run_options.save is not None and len(ready) == 1:
        run_options = replace(run_options, save=Path(run_options.save) / "0000")  # as any batch lies
    view = View(given["json"], batch, given["candidates"] or SHOWN_CANDIDATES, given["stages"])
    with StderrReport() as report, looking(session, rules) as recording:
        if given["step"] or rules:
            view.stepper = Stepper(session, rules, pausing=given["step"], recording=recording)
        live = session.start(ready, run_options, progress=report.reading)
        with _metrics_file(given["metrics_textfile"], live):
            follow(live, view)
    if run_options.keep_logits:
        tell_missing_logits(live.traces)


def _metrics_file(path: Path | None, live: "LiveRun") -> AbstractContextManager[None]:
    if path is None:
        return nullcontext()
    from decodescope.monitor.textfile import textfile

    return textfile(path, live.traces)


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
