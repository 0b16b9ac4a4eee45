"""A bench as a picture: every rate as a bar, with its spread and the machine's limit."""

from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.cli.bench_view import Rated, described
from decodescope.cli.one_prompt import tell_image
from decodescope.locale import translate as t
from decodescope.visible import visible

if TYPE_CHECKING:
    from decodescope.experiments.bench.records import BenchReport
    from decodescope.pictures import Bar


def write_picture(path: Path, report: "BenchReport") -> None:
    """Draw the report into a file; nothing where no rate is known. Raises InputError."""
    from decodescope.pictures import Texts, draw_bars

    words = {"x": t("bench.rate"), "scale": t("bench.limit")}
    decode = [_bar(row) for row in report.decode]
    prefill = [_bar(row) for row in report.prefill]
    charts = [
        (decode, Texts(t("bench.picture_decode", model=visible(report.model)), **words)),
        (prefill, Texts(t("bench.picture_prefill"), **words)),
    ]
    if shown := [chart for chart in charts if chart[0]]:
        tell_image(path, draw_bars(path, shown))


def _bar(row: Rated) -> "Bar":
    from decodescope.pictures import Bar

    rates = row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max
    return Bar(described(row), *rates, row.limit_tokens_per_s)
