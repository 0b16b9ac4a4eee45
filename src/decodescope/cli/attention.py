"""`decodescope attention`: who looks at whom, head by head."""

from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.attention_picture import write_picture
from decodescope.cli.attention_view import draw_attention
from decodescope.cli.one_prompt import check_image, opened
from decodescope.locale import translate as t
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from decodescope.experiments.attention import AttentionPlan


def attention(
    prompt: Annotated[str, o.prompt_argument("run.prompt")],
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    layer: o.Layers = None,
    head: o.Heads = None,
    position: o.Positions = None,
    steps: o.Steps = 0,
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
    from decodescope.experiments.attention import study_attention

    with opened(given) as (session, ready, report):
        found = study_attention(session, ready, plan, report.reading)
    if json:
        print(document_text(found.report))
    else:
        draw_attention(found)
    if image is not None:
        write_picture(image, found)


attention.__doc__ = t("help.attention")


def _plan(given: dict[str, Any]) -> "AttentionPlan":
    """A picture shows the whole triangle where no rows were named; only a document needs the rows themselves."""
    from decodescope.experiments.attention import AttentionPlan

    positions = given["position"] or (("all",) if given["image"] is not None else ())
    return AttentionPlan(given["layer"] or (), given["head"] or (), positions, given["steps"], given["json"])
