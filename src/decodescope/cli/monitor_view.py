"""Drawing what a watched server does."""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from decodescope.cli.console import line, out
from decodescope.cli.tables import plain_table
from decodescope.cli.units import binary_bytes, figure, milliseconds, number, percent
from decodescope.locale import translate as t
from decodescope.monitor.readings import Figures
from decodescope.monitor.watching import UNTOLD, Raised, Reading
from decodescope.trace.lines import document_text
from decodescope.visible import visible

_NOTHING_YET = "–"
_STATES = {"pending": ("monitor.alert.pending", "yellow"), "firing": ("monitor.alert.firing", "bold red")}


def _whole(value: float) -> str:
    return number(value, 0)


def _tenths(value: float) -> str:
    return number(value, 1)


def _bytes(value: float) -> str:
    return binary_bytes(int(value))


# What stands in a row, and how it is written.
_ROWS: dict[str, tuple[Callable[[float], str], tuple[str, ...]]] = {
    "monitor.row.tokens": (_tenths, ("tokens_per_s",)),
    "monitor.row.prompt_tokens": (_tenths, ("prompt_tokens_per_s",)),
    "monitor.row.requests": (_whole, ("requests_running", "requests_waiting")),
    "monitor.row.first_token": (milliseconds, ("ttft_p50_s", "ttft_p95_s")),
    "monitor.row.each_token": (milliseconds, ("inter_token_p50_s", "inter_token_p95_s")),
    "monitor.row.kv_cache": (percent, ("kv_cache_usage_ratio",)),
    "monitor.row.prefix": (percent, ("prefix_hit_ratio",)),
    "monitor.row.entropy": (number, ("entropy_nats_mean",)),
    "monitor.row.repetition": (percent, ("repetition_ratio_mean",)),
    "monitor.row.loops": (_whole, ("loops", "answers_begun")),
    "monitor.row.nonfinite": (_whole, ("nonfinite_logits",)),
    "monitor.row.resident": (_bytes, ("resident_bytes",)),
    "monitor.row.memory": (percent, ("memory_usage_ratio",)),
    "monitor.row.device_memory": (percent, ("device_memory_usage_ratio",)),
    "monitor.row.celsius": (_whole, ("device_celsius",)),
}


def draw(readings: Iterable[Reading], json: bool) -> None:
    """Show readings as they come: as JSON lines, in place on a terminal, else one below the other."""
    if json:
        for reading in readings:
            print(document_text(reading), flush=True)
    elif out().is_terminal:
        with Live(console=out(), auto_refresh=False) as live:
            for reading in readings:
                live.update(_drawing(reading), refresh=True)
    else:
        for reading in readings:
            out().print(_drawing(reading))


def _drawing(reading: Reading) -> RenderableType:
    head = (reading.url, reading.server or "", " ".join(reading.models))
    parts: list[RenderableType] = [line((" · ".join(filter(None, head)), "bold"))]
    if reading.fault:
        parts.append(_wrapped(reading.fault, "red"))
    else:
        table = plain_table()
        table.show_header = False
        for label, (written, names) in _ROWS.items():
            table.add_row(line((t(label), "dim")), _cell(reading.figures, names, written))
        seconds = {"step": number(reading.step_s, 1), "window": _whole(reading.window_s)}
        parts += [table, _wrapped(t("monitor.stretch", **seconds), "dim")]
    return Group(*parts, *_alerts(reading))


def _cell(figures: Figures, names: tuple[str, ...], written: Callable[[float], str]) -> Text:
    """What a server does not export is no zero, nor is what nothing has happened of."""
    if all(name in figures.unavailable for name in names):
        return line((t("monitor.unavailable"), "dim"))
    values = [getattr(figures, name) for name in names]
    return line(" / ".join(_NOTHING_YET if value is None else written(value) for value in values))


def _alerts(reading: Reading) -> Iterator[Text]:
    for raised in reading.alerts:
        state, style = _STATES[raised.state]
        yield _wrapped(f"! {t(state)} {raised.name}: {_sentence(raised, reading)}", style)
    if not reading.alerts:
        yield line((t("monitor.no_alerts"), "green"))
    yield _wrapped(t("monitor.untold", names=", ".join(UNTOLD)), "dim")


def _wrapped(text: str, style: str) -> Text:
    return Text(visible(text), style=style)


def _sentence(raised: Raised, reading: Reading) -> str:
    return t(
        f"alert.{raised.key}.summary",
        instance=reading.url,
        model=" ".join(reading.models) or t("monitor.the_model"),
        device=t("monitor.a_device"),
        value=figure(raised.measured),
        percent=percent(raised.measured),
    )
