"""Settings side by side as a picture: entropy and top probability by step, a line for each setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.cli.one_prompt import tell_image
from decodescope.locale import translate as t
from decodescope.visible import visible

if TYPE_CHECKING:
    from decodescope.experiments.sample_records import SampleReport
    from decodescope.pictures import Curve


def write_picture(path: Path, report: "SampleReport") -> None:
    """Draw the report into a file; nothing where not one step is known. Raises InputError."""
    from decodescope.pictures import Texts, draw_stacked

    shown = [setting for setting in report.summary if setting.entropy_nats_by_step]
    if not shown:
        return
    title = t("sample.picture", model=visible(report.model))
    entropies = [_curve(setting.name, setting.entropy_nats_by_step) for setting in shown]
    tops = [_curve(setting.name, setting.top_prob_by_step) for setting in shown]
    charts = [
        (entropies, Texts(title, y=t("sample.axis_entropy"))),
        (tops, Texts("", x=t("sample.axis_step"), y=t("sample.axis_top"))),
    ]
    tell_image(path, draw_stacked(path, charts))


def _curve(name: str, by_step: Sequence[float]) -> "Curve":
    import numpy as np

    from decodescope.pictures import Curve

    return Curve(name, np.arange(len(by_step), dtype=float), np.array(by_step))
