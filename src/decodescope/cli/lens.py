"""`decodescope lens`: what each layer would have said, and where the answer's logit comes from."""

from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.lens_picture import write_picture
from decodescope.cli.lens_view import draw_lens
from decodescope.cli.one_prompt import check_image, opened
from decodescope.locale import translate as t
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from decodescope.experiments.lens import LensPlan

Top = Annotated[int, o.option("lens.top", "--top", metavar="K")]
Target = Annotated[str | None, o.option("lens.target", "--target", metavar="TOKEN")]


def lens(
    prompt: Annotated[str, o.prompt_argument("run.prompt")],
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    position: o.Positions = None,
    steps: o.Steps = 0,
    layer: o.Layers = None,
    top: Top = 5,
    target: Target = None,
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
    from decodescope.experiments.lens import study_lens

    with opened(given) as (session, ready, report):
        found = study_lens(session, ready, plan, report.reading)
    if json:
        print(document_text(found))
    else:
        draw_lens(found)
    if image is not None:
        write_picture(image, found)


lens.__doc__ = t("help.lens")


def _plan(given: dict[str, Any]) -> "LensPlan":
    from decodescope.experiments.lens import LensPlan

    positions, layers = given["position"] or (), given["layer"] or ()
    return LensPlan(positions, given["steps"], layers, given["top"], given["target"])
