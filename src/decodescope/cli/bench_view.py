"""Drawing a bench: the machine, then axis by axis what was measured beside what the machine gives."""

from collections.abc import Sequence

from rich.text import Text

from decodescope.cli.bars import bar
from decodescope.cli.console import line, out
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import billions, binary_bytes, count, number, share
from decodescope.experiments.bench.records import BenchReport, DecodeRow, EngineRow, Machine, PrefillRow
from decodescope.locale import translate as t

Rated = DecodeRow | PrefillRow
AXES = {
    "machine": "bench.axis.machine",
    "load": "bench.axis.load",
    "context": "bench.axis.context",
    "batch": "bench.axis.batch",
    "recording": "bench.axis.recording",
    "prefill": "bench.axis.prefill",
    "cache": "bench.axis.cache",
    "kernels": "bench.axis.kernels",
    "format": "bench.axis.format",
    "against": "bench.axis.against",
}
ENGINES = {"llamacpp": "llama.cpp", "openvino": "OpenVINO GenAI"}
_REASONS = {
    "not_installed": "bench.not_installed",
    "only_gguf": "bench.only_gguf",
    "failed": "bench.failed",
    "no_cold": "bench.no_cold",
}
_BAR_CELLS = 24
_ALONE = ("context", "batch", "recording", "prefill")  # axes of ours alone, one kind of work each
_TOGETHER = ("kernels", "format", "against")  # contenders, decode and prefill of each
_COLUMNS = ("bench.what", "bench.rate", "bench.spread", "bench.share", "bench.bar", "bench.ratio")
_MEMORY_COLUMNS = ("bench.engine", "bench.weights", "bench.ready", "bench.loading_peak", "bench.peak")
_CACHE_COLUMNS = ("kv.length", "bench.forwards_with", "bench.forwards_without", "bench.seconds_with",
                  "bench.seconds_without", "bench.times")  # fmt: skip
_LEFT = {"bench.what", "bench.engine", "bench.bar"}


def draw_report(report: BenchReport) -> None:
    """Everything that was measured."""
    named = {"model": report.model, "architecture": report.architecture, "parameters": count(report.parameters)}
    stored = ", ".join(f"{name} {binary_bytes(size)}" for name, size in report.stored_bytes.items())
    out().print(line((t("bench.title", **named), "bold")))
    out().print(line("  ", (t("bench.stored", formats=stored), "dim")))
    _draw_machine(report.machine)
    rated: list[Rated] = [*report.decode, *report.prefill]
    for axis in _ALONE:
        _draw_axis(axis, [row for row in rated if row.axis == axis])
    _draw_cache(report)
    for axis in _TOGETHER:
        _draw_axis(axis, [row for row in rated if row.axis == axis])
    _draw_engines(report)
    _draw_memory(report)
    for missing in report.missing:
        said = t(_REASONS[missing.reason], what=ENGINES.get(missing.what, missing.what), detail=missing.detail)
        out().print(line(("! " + said, "yellow")))
    _draw_how(report)
    if not report.complete:
        out().print(line((t("bench.incomplete"), "yellow")))


def _draw_how(report: BenchReport) -> None:
    """What the reader must know to judge the figures."""
    told = ["bench.how", "bench.how_limit"]
    if any(row.filled for row in report.decode):
        told.append("bench.how_filled")
    for key in told:
        out().print(line((t(key), "dim")))


def _draw_machine(machine: Machine) -> None:
    draw_heading(t("bench.axis.machine"))
    about = {"processor": machine.processor, "cores": machine.cores, "threads": machine.threads}
    memory = binary_bytes(machine.memory_total_bytes)
    out().print(line("  ", t("bench.machine", **about, memory=memory, device=machine.device)))
    kernels = machine.kernels or t("bench.no_kernels", reason=machine.kernels_missing)
    load = "-" if machine.load_average is None else number(machine.load_average, 1)
    out().print(line("  ", t("bench.software", torch=machine.torch, kernels=kernels, load=load)))
    table = plain_table(("bench.threads", "bench.read", "bench.spread"))
    for dtype in dict.fromkeys(rate.dtype for rate in machine.gemm):
        table.add_column(t("bench.gemm", dtype=dtype), justify="right")
        table.add_column(t("bench.spread"), justify="right")
    for read in machine.read:
        cells = [count(read.threads), *_giga(read.bytes_per_s, read.bytes_per_s_min, read.bytes_per_s_max)]
        for gemm in machine.gemm:
            cells += _giga(gemm.flops, gemm.flops_min, gemm.flops_max) if gemm.threads == read.threads else ()
        table.add_row(*map(Text, cells))
    out().print(table)
    if machine.threads_in_vain:
        gains = {"read": _times(machine.read_gain), "gemm": _times(machine.gemm_gain)}
        out().print(line(("! " + t("bench.in_vain", threads=machine.threads, **gains), "yellow")))


def _draw_axis(axis: str, rows: Sequence[Rated]) -> None:
    """Everything that took turns: of each row what it did, how fast, and what that is of the limit."""
    if not rows:
        return
    draw_heading(t(AXES[axis]))
    table = plain_table(_COLUMNS + ("bench.same",) * (axis == "against"), _LEFT)
    for row in rows:
        cells = [described(row), *_rate(row), _share(row.limit_share)]
        filled = Text(bar(row.limit_share or 0.0, _BAR_CELLS, rest="·"), "cyan")
        table.add_row(*map(Text, cells), filled, Text(_times(row.ratio)), Text(_same(row)))
    out().print(table)


def _same(row: Rated) -> str:
    """How many of the first row's tokens came out here."""
    if not isinstance(row, DecodeRow) or row.axis != "against" or row.same_tokens is None:
        return ""
    return f"{row.same_tokens}/{row.new_tokens}"


def described(row: Rated) -> str:
    """What tells a row from the others of its axis."""
    if row.axis in _TOGETHER:
        work = t("bench.prefill" if isinstance(row, PrefillRow) else "bench.decode")
        return f"{_name(row)}, {work}"
    if isinstance(row, PrefillRow):
        return t("bench.tokens", count=count(row.tokens))
    if row.axis == "batch":
        return t("bench.rows", count=row.batch)
    if row.axis == "recording":
        return t("bench.recorded" if row.recording else "bench.bare")
    return t("bench.filled" if row.filled else "bench.behind", count=count(row.context))


def _draw_engines(report: BenchReport) -> None:
    """Which builds took part."""
    told = {"decodescope"}
    for engine in report.engines:
        if engine.engine not in told:
            told.add(engine.engine)
            said = f"{_engine(engine.engine)} {engine.version}: {engine.build}"
            out().print(line("  ", (said, "dim")))
    if report.engines_took_turns:
        out().print(line("  ", (t("bench.took_turns"), "dim")))


def _draw_cache(report: BenchReport) -> None:
    if not report.compared:
        return
    draw_heading(t("bench.axis.cache"))
    table = plain_table(_CACHE_COLUMNS)
    for cached, uncached, compared in zip(report.cached, report.uncached, report.compared, strict=True):
        passes = count(cached.token_forwards), count(uncached.token_forwards)
        seconds = number(cached.seconds), number(uncached.seconds)
        table.add_row(*map(Text, (count(cached.length), *passes, *seconds, _times(compared.seconds_ratio))))
    out().print(table)


def _draw_memory(report: BenchReport) -> None:
    if report.engines:
        draw_heading(t("bench.memory"))
    table = plain_table(_MEMORY_COLUMNS, _LEFT)
    for row in report.engines:
        sizes = (row.weights_bytes, row.ready_rss_bytes, row.loading_peak_rss_bytes, row.peak_rss_bytes)
        cells = ["-" if size is None else binary_bytes(size) for size in sizes]
        table.add_row(*map(Text, (_name(row), *cells)))
    if report.engines:
        out().print(table)
    for load in report.load:
        between = _between(number(load.seconds_min, 2), number(load.seconds_max, 2))
        said = {"seconds": number(load.seconds, 2), "between": between, "rounds": load.rounds}
        out().print(line("  ", t("bench.load_cold" if load.file == "cold" else "bench.load_warm", **said)))


def _name(row: Rated | EngineRow) -> str:
    """Engine, format and, where it is ours without compiled kernels, that."""
    portable = row.engine == "decodescope" and row.kernels is None
    return " ".join((_engine(row.engine), row.format, *[t("bench.portable")] * portable))


def _engine(name: str) -> str:
    return ENGINES.get(name, name)


def _rate(row: Rated) -> tuple[str, str]:
    least, most = number(row.tokens_per_s_min, 1), number(row.tokens_per_s_max, 1)
    return number(row.tokens_per_s, 1), _between(least, most)


def _giga(median: float, least: float, most: float) -> tuple[str, str]:
    return billions(median), _between(billions(least), billions(most))


def _between(least: str, most: str) -> str:
    return f"{least} – {most}"


def _share(of_limit: float | None) -> str:
    return "-" if of_limit is None else share(of_limit)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"× {number(ratio, 2)}"
