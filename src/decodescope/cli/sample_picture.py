"""Settings side by side as a picture: entropy and top probability by step, a line for each setting."""

from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.cli.one_prompt import tell_image
from decodescope.locale import translate as t
from decodescope.visible import visible

if TYPE_CHECKING:
    from decodescope.experiments.sample_records import SampleReport


def write_picture(path: Path, report: "SampleReport") -> None:
    """Draw the report into a file; nothing where not one step is known. Raises InputError."""
    import numpy as np

    from decodescope.pictures import Curve, Texts, draw_stacked

    shown = [setting for setting in report.summary if setting.entropy_nats_by_step]
    if not shown:
        return
    entropies = [setting.entropy_nats_by_step for setting in shown]
    tops = [setting.top_prob_by_step for setting in shown]
    title = t("sample.picture", model=visible(report.model))
    words = (Texts(title, y=t("sample.axis_entropy")), Texts("", x=t("sample.axis_step"), y=t("sample.axis_top")))
    charts = [
        (
            [
                Curve(one.name, np.arange(len(line), dtype=float), np.array(line))
                for one, line in zip(shown, lines, strict=True)
            ],
            texts,
        )
        for lines, texts in zip((entropies, tops), words, strict=True)
    ]
    tell_image(path, draw_stacked(path, charts))
