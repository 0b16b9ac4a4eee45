"""`decodescope fork`: go back to a step of a saved run, and on from there with other tokens."""

from json import JSONDecodeError, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport
from decodescope.cli.fork_view import draw_forks
from decodescope.cli.show import BranchNumber, Folder
from decodescope.cli.units import figure
from decodescope.errors import FindingError, InputError
from decodescope.locale import translate as t
from decodescope.trace.folder import FolderLock, refuse_unfit
from decodescope.trace.lines import document_text
from decodescope.trace.records import Run, Trace
from decodescope.trace.saved import read_trace

if TYPE_CHECKING:
    from decodescope.experiments.fork_records import ForkReport
    from decodescope.experiments.forks import Forking

At = Annotated[int, o.option("fork.at", "--at", metavar="STEP")]
Tokens = Annotated[list[str] | None, o.option("fork.token", "--token", metavar="TEXT|ID")]
NewTokens = Annotated[int | None, o.option("fork.max_new_tokens", "--max-new-tokens", "-n", metavar="N")]
Branches = Annotated[int | None, o.option("fork.branches", "--branches", metavar="K")]
Depth = Annotated[int | None, o.option("fork.depth", "--depth", metavar="D")]
Verify = Annotated[bool, o.option("fork.verify", "--verify")]
Model = Annotated[str | None, o.option("fork.model", "--model", "-m", metavar="MODEL")]
Quantize = Annotated[str | None, o.option("fork.quantize", "--quantize", metavar="none|int8|int4|nf4")]
Dtype = Annotated[str | None, o.option("fork.dtype", "--dtype", metavar="float32|bfloat16|float16")]

_LONGEST_ID = 18  # digits


def fork(
    folder: Folder,
    at: At,
    token: Tokens = None,
    branches: Branches = None,
    depth: Depth = None,
    max_new_tokens: NewTokens = None,
    branch: BranchNumber = None,
    verify: Verify = False,
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
    model: Model = None,
    json: o.Json = False,
    dtype: Dtype = None,
    cache_dtype: o.CacheDtype = None,
    quantize: Quantize = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    engine: o.Engine = "native",
    lang: o.Lang = None,
) -> None:
    given = dict(locals())
    whole = _read(folder)
    trace = whole if branch is None else whole.branch(branch)
    plan = _plan(given, trace)
    from decodescope.experiments.forks import ForkStudy
    from decodescope.session import Session

    with StderrReport() as report:
        opened = model or _model_of(trace.run, report)
        session = Session.open(
            opened,
            report=report,
            progress=report.loading,
            **_loading(given, trace.run),
        )
        study = ForkStudy(session, trace, plan)
        try:
            study.run(report.reading)
        finally:  # whatever stops the forks, what came of them by then is shown
            report.close()
            if study.started:
                found = study.report()
                print(document_text(found)) if json else draw_forks(found, whole)
    _raise_findings(found)


fork.__doc__ = t("help.fork")


def _loading(given: dict[str, Any], run: Run) -> dict[str, Any]:
    """How to hold the model: as the run did, where nothing else is asked for."""
    asked = given["dtype"], given["quantize"]
    if asked != (None, None):
        dtype, quantize = asked
    elif run.weights in (None, "float16"):
        dtype, quantize = run.weights or run.dtype, None
    else:
        dtype, quantize = None, None if run.weights == "packed" else run.weights
    cache_dtype = given["cache_dtype"] or run.cache_dtype
    return {
        "dtype": dtype,
        "quantize": quantize or "none",
        "cache_dtype": cache_dtype,
        "device": given["device"],
        "threads": given["threads"],
    }


def _read(folder: Path) -> Trace:
    """A run that may be added to."""
    trace = read_trace(folder)
    FolderLock(folder).release()  # nobody is writing
    refuse_unfit(folder)
    return trace


def _plan(given: dict[str, Any], trace: Trace) -> "Forking":
    """What can be refused before the model is loaded, is."""
    if given["engine"] != "native":
        raise InputError("engine.unknown", name=given["engine"])
    if given["depth"] is not None and given["branches"] is None:
        raise InputError("fork.depth_needs_branches")
    if given["depth"] is not None and given["depth"] < 1:
        raise InputError("fork.depth", value=given["depth"])
    from decodescope.experiments.forks import Forking, checked_options

    length = given["max_new_tokens"] if given["depth"] is None else given["depth"]
    values = {**o.sampling_of(given), "max_new_tokens": length, "guards": tuple(given["guard"] or ()) or None}
    changes = {name: value for name, value in values.items() if value is not None}
    tokens = tuple(map(token_argument, given["token"] or ()))
    plan = Forking(given["at"], tokens, given["branches"], changes, given["verify"])
    checked_options(trace, plan)
    return plan


def token_argument(text: str) -> str | int:
    """A token as it is written: digits are an id, "text in double quotes" may hold escapes such as \\n or digits.

    Raises InputError for quotes that hold no text.
    """
    if text.isascii() and text.isdecimal() and len(text) <= _LONGEST_ID:
        return int(text)
    if not (len(text) > 1 and text[0] == text[-1] == '"'):
        return text
    try:
        return str(loads(text))
    except JSONDecodeError:
        raise InputError("fork.quoted", text=text) from None


def _model_of(run: Run, report: StderrReport) -> str:
    """The run's own model, where it lies or by its name; nothing that a run folder names is fetched."""
    from decodescope.models import find_model

    for spec in (run.path, run.model):
        try:
            find_model(spec, report, download=False)
        except InputError:
            continue
        return spec
    raise InputError("fork.model_not_here", model=run.model, path=run.path)


def _raise_findings(report: "ForkReport") -> None:
    for branch in report.branches:
        check = branch.verification
        if check is not None and not check.agrees:
            raise FindingError(
                "fork.differs",
                number=branch.number,
                difference=figure(check.largest_difference, 2),
                tolerance=figure(check.tolerance, 2),
            )
