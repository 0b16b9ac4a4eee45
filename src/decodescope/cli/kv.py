"""`decodescope kv`: how big the KV cache is, how it grows, and what it buys."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport
from decodescope.cli.kv_view import draw_curve, draw_table, write_picture
from decodescope.cli.one_prompt import check_image, opened
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from decodescope.experiments.cache_curve import CachePlan
    from decodescope.experiments.cache_records import CacheReport

NewTokens = Annotated[int, o.option("kv.new_tokens", "--max-new-tokens", "-n", metavar="N")]
Lengths = Annotated[str, o.option("kv.lengths", "--lengths", metavar="L,L,...")]
Repeats = Annotated[int, o.option("kv.repeats", "--repeats", metavar="N")]
NoExperiment = Annotated[bool, o.option("kv.no_experiment", "--no-experiment")]


def kv(
    prompt: Annotated[str, o.prompt_argument("run.prompt")],
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    max_new_tokens: NewTokens = 8,
    lengths: Lengths = "32,64,128,256",
    repeats: Repeats = 1,
    no_experiment: NoExperiment = False,
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
    plan = _plan(given)
    if image is not None:
        check_image(image)
        if not plan.lengths:
            raise InputError("kv.image_needs_lengths")
    from decodescope.experiments.cache_curve import study_cache

    with opened(given) as (session, ready, report):
        _follow(study_cache(session, ready, plan, report.measuring), View(json, image), report)


kv.__doc__ = t("help.kv")


def _plan(given: dict[str, Any]) -> "CachePlan":
    from decodescope.experiments.cache_curve import CachePlan

    lengths = () if given["no_experiment"] else _lengths(given["lengths"])
    return CachePlan(given["max_new_tokens"], lengths, given["repeats"])


def _lengths(text: str) -> tuple[int, ...]:
    """Prompt lengths in rising order, each once; none for an empty text."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text.strip() else ()
    except ValueError:
        raise InputError("kv.lengths", value=text) from None


class View:
    """Draws the table as soon as it is whole, the curve at the end; or one JSON document. And the picture."""

    def __init__(self, json: bool, image: Path | None) -> None:
        self.json, self.image, self.drawn = json, image, False

    def show(self, report: "CacheReport") -> None:
        if not self.json and not self.drawn and report.finish_reason is not None:
            draw_table(report)
            self.drawn = True

    def end(self, report: "CacheReport") -> None:
        if self.json:
            print(document_text(report))
        else:
            if not self.drawn:
                draw_table(report)
            draw_curve(report)
        if self.image is not None and report.compared:
            write_picture(self.image, report)


def _follow(reports: "Iterable[CacheReport]", view: View, progress: StderrReport) -> None:
    """Whatever ends the study, what it had measured by then is shown."""
    latest = None
    try:
        for latest in reports:
            view.show(latest)
    finally:
        progress.close()
        if latest is not None:
            view.end(latest)
