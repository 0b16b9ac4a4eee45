"""The lens as a picture: one position as curves over the layers, several as a map of what each layer would say."""

from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.cli.one_prompt import tell_image
from decodescope.locale import translate as t
from decodescope.visible import token_text, visible

if TYPE_CHECKING:
    from decodescope.experiments.lens_records import LensReport


def write_picture(path: Path, report: "LensReport") -> None:
    """Draw the report into a file. Raises InputError."""
    missing = _draw_curves(path, report) if len(report.positions) == 1 else _draw_map(path, report)
    tell_image(path, missing)


def _draw_curves(path: Path, report: "LensReport") -> tuple[str, ...]:
    """Entropy, divergence and how surprising the answer is, all in nats, so that one axis serves them all."""
    import numpy as np

    from decodescope.pictures import Curve, Texts, draw_curves

    (position,) = report.positions
    layers, choice = position.layers, token_text(position.choice.text)
    values = {
        t("lens.curve_entropy"): [layer.entropy_nats for layer in layers],
        t("lens.curve_kl"): [layer.kl_nats for layer in layers],
        t("lens.curve_surprise", token=choice): [-layer.choice_logprob_nats for layer in layers],
    }
    if report.target is not None:
        label = t("lens.curve_surprise", token=token_text(report.target.text))
        values[label] = [-(layer.target_logprob_nats or 0.0) for layer in layers]
    numbers = np.array([layer.layer for layer in layers])
    curves = [Curve(label, numbers, np.array(heights)) for label, heights in values.items()]
    place = {"position": position.position, "token": token_text(position.text), "choice": choice}
    title = t("lens.picture_one", model=visible(report.model), **place)
    return draw_curves(path, curves, Texts(title, x=t("lens.layer"), y=t("lens.nats")))


def _draw_map(path: Path, report: "LensReport") -> tuple[str, ...]:
    """Layers downwards from the last, positions across; in each cell the layer's first token and its share."""
    import numpy as np

    from decodescope.pictures import Matrix, Texts, draw_heat_map

    columns = [f"{position.position} {token_text(position.text)}" for position in report.positions]
    rows = list(zip(*(reversed(position.layers) for position in report.positions), strict=True))
    tops = [[layer.top[0] for layer in row] for row in rows]
    matrix = Matrix(
        np.array([[top.prob for top in row] for row in tops]),
        [str(row[0].layer) for row in rows],
        columns,
        [[token_text(top.text) for top in row] for row in tops],
    )
    title = t("lens.picture_many", model=visible(report.model))
    texts = Texts(title, x=t("lens.axis_positions"), y=t("lens.layer"), scale=t("lens.axis_prob"))
    return draw_heat_map(path, matrix, texts)
