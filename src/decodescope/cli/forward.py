"""`decodescope forward`: every inner value of a pass, in the order of computation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.forward_verdict import place
from decodescope.cli.forward_view import draw_forward
from decodescope.cli.one_prompt import opened
from decodescope.cli.units import budget_bytes
from decodescope.errors import FindingError
from decodescope.locale import translate as t
from decodescope.trace.folder import refuse_used
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from decodescope.experiments.forward import ForwardPlan
    from decodescope.experiments.forward_records import ForwardReport


Sites = Annotated[list[str] | None, o.option("forward.site", "--site", metavar="PATTERN")]
Values = Annotated[bool, o.option("forward.values", "--values")]
Keep = Annotated[list[str] | None, o.option("forward.keep", "--keep", metavar="PATTERN")]
KeepBudget = Annotated[str, o.option("forward.keep_budget", "--keep-budget", metavar="BYTES")]
Against = Annotated[Path | None, o.option("forward.against", "--against", metavar="DIR")]
Rope = Annotated[bool, o.option("forward.rope", "--rope")]
RopePosition = Annotated[int | None, o.option("forward.rope_position", "--rope-position", metavar="P")]
Tolerance = Annotated[float | None, o.option("forward.tolerance", "--tolerance", metavar="X")]


def forward(
    prompt: Annotated[str, o.prompt_argument("run.prompt")],
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    steps: o.Steps = 0,
    site: Sites = None,
    layer: o.Layers = None,
    values: Values = False,
    keep: Keep = None,
    keep_budget: KeepBudget = "256MiB",
    save: o.Save = None,
    against: Against = None,
    tolerance: Tolerance = None,
    rope: Rope = False,
    rope_position: RopePosition = None,
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
    if save is not None:
        refuse_used(save)
    plan = _plan(given)
    from decodescope.experiments.forward import ForwardStudy

    stopped: FindingError | None = None
    with opened(given) as (session, ready, progress):
        study = ForwardStudy(session, ready, plan)
        try:
            study.run(progress.reading)
        except FindingError as finding:  # nothing could be chosen from the logits: where it began says more
            stopped = finding
        finally:  # whatever stops the run, what was seen by then is shown
            progress.close()
            if study.started:
                report = study.report()
                print(document_text(report)) if json else draw_forward(report)
    _raise_findings(report)
    if stopped is not None:
        raise stopped


forward.__doc__ = t("help.forward")


def _plan(given: dict[str, Any]) -> "ForwardPlan":
    from decodescope.experiments.forward import ForwardPlan, read_reference
    from decodescope.experiments.rope import RopePlan

    position = given["rope_position"]
    return ForwardPlan(
        steps=given["steps"],
        sites=tuple(given["site"] or ()),
        layers=tuple(given["layer"] or ()),
        values=given["values"],
        keep=tuple(given["keep"] or ()),
        budget_bytes=budget_bytes(given["keep_budget"]),
        save=given["save"],
        against=given["against"] and read_reference(given["against"]),
        tolerance=given["tolerance"],
        rope=RopePlan(position) if given["rope"] or position is not None else None,
    )


def _raise_findings(report: "ForwardReport") -> None:
    """A fault that the numbers show is the exit code 1. Raises FindingError."""
    broken, against = report.first_nonfinite, report.against
    if broken is not None:
        raise FindingError("forward.nonfinite", site=place(broken), position=broken.position)
    if against is None:
        return
    if against.ids_part_at is not None:
        raise FindingError("forward.ids_part", position=against.ids_part_at, folder=against.folder)
    if against.departure is not None:
        departs = against.departure
        raise FindingError("forward.departs", site=place(departs), step=departs.step, folder=against.folder)
    if against.tokens_part_at is not None:
        raise FindingError("forward.tokens_part", step=against.tokens_part_at, folder=against.folder)
