"""`decodescope bench`: how fast, against what the machine gives, and against other engines."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.bench_picture import write_picture
from decodescope.cli.bench_view import AXES, draw_report
from decodescope.cli.console import StderrReport
from decodescope.cli.one_prompt import check_image
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from decodescope.experiments.bench.plan import Plan
    from decodescope.experiments.bench.study import Bench

Numbers = str | None
Quick = Annotated[bool, o.option("bench.quick", "--quick")]
Full = Annotated[bool, o.option("bench.full", "--full")]
Only = Annotated[str | None, o.option("bench.only", "--only", metavar="AXIS,...")]
Contexts = Annotated[Numbers, o.option("bench.contexts", "--context", metavar="N,N,...")]
Batches = Annotated[Numbers, o.option("bench.batches", "--batch", metavar="N,N,...")]
Prefills = Annotated[Numbers, o.option("bench.prefills", "--prefill", metavar="N,N,...")]
Formats = Annotated[str | None, o.option("bench.formats", "--formats", metavar="FORMAT,...")]
Against = Annotated[str | None, o.option("bench.against", "--against", metavar="ENGINE,...")]
NewTokens = Annotated[int | None, o.option("bench.new_tokens", "--max-new-tokens", "-n", metavar="N")]
Rounds = Annotated[int | None, o.option("bench.rounds", "--rounds", metavar="N")]


def bench(
    model: o.Model = "starter",
    quick: Quick = False,
    full: Full = False,
    only: Only = None,
    context: Contexts = None,
    batch: Batches = None,
    prefill: Prefills = None,
    formats: Formats = None,
    against: Against = None,
    max_new_tokens: NewTokens = None,
    rounds: Rounds = None,
    image: o.Image = None,
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
    if engine != "native":
        raise InputError("engine.unknown", name=engine)
    plan = _plan(given)
    if image is not None:
        check_image(image)
    from decodescope.experiments.bench.study import open_bench

    with StderrReport() as report:
        study = open_bench(model, plan, o.loading_of(given), report)
        _follow(study, report, given)


bench.__doc__ = t("help.bench")


def _plan(given: dict[str, Any]) -> "Plan":
    from decodescope.experiments.bench.plan import DEFAULT, FULL, QUICK, settle
    from decodescope.experiments.peers.known import parse_peers

    if given["quick"] and given["full"]:
        raise InputError("bench.quick_or_full")
    changes = {
        "axes": _words(given["only"]),
        "contexts": _numbers("--context", given["context"]),
        "batches": _numbers("--batch", given["batch"]),
        "prefills": _numbers("--prefill", given["prefill"]),
        "formats": _words(given["formats"]),
        "peers": None if given["against"] is None else parse_peers(given["against"]),
        "new_tokens": given["max_new_tokens"],
        "rounds": given["rounds"],
    }
    return settle(QUICK if given["quick"] else FULL if given["full"] else DEFAULT, changes)


def _words(text: str | None) -> tuple[str, ...] | None:
    """The words of a list, each once; None where nothing was given."""
    return None if text is None else tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError("bench.not_numbers", option=option, value=text) from None


def _follow(study: "Bench", progress: StderrReport, given: dict[str, Any]) -> None:
    """Whatever ends the study, what it had measured by then is shown."""
    try:
        with closing(study.steps()) as steps:
            for at in steps:
                progress.timing(t(AXES[at.part]), at.done, at.total)
    finally:
        progress.close()
        if (report := study.report()) is not None:
            if given["json"]:
                print(document_text(report))
            else:
                draw_report(report)
            if given["image"] is not None:
                write_picture(given["image"], report)
