"""The metrics of finished runs, from their traces, as a file for node_exporter's textfile collector."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from decodescope.errors import FindingError, InputError
from decodescope.monitor.metrics import Metrics
from decodescope.trace.records import Step, Trace

_REASONS = {"stop": "stop", "length": "length", "interrupted": "abort", "error": "error"}


def metrics_of(traces: Sequence[Trace], finding: FindingError | None = None) -> Metrics:
    """What the traces of one run (one or more, of one model) come to, in the series that a server exports.

    Counts are those of the branches that were kept, latencies those that their steps measured. A run meets no
    queue and no other request's cache: the series of those stay empty. Of the gauges there is the peak of resident
    memory; what was true in passing is past. `finding` is what ended the run, if non-finite logits did.
    """
    peak = max((trace.end.peak_rss_bytes or 0 for trace in traces if trace.end), default=0)
    metrics = Metrics(
        traces[0].run.model, measure=lambda: [("process_peak_resident_bytes", (), peak)] if peak else []
    )
    for row, trace in enumerate(traces):
        path = trace.path()
        metrics.began(len(trace.run.prompt_tokens))
        for step in path:
            metrics.stepped(str(row), step, _seconds(step))
        if trace.end:
            reason = _REASONS[trace.end.finish_reason]
            if reason == "error" and finding:  # which row it was, is not told; that it was one, is
                reason, finding = "nonfinite", None
            metrics.ended(str(row), trace, sum(step.timing.total_s for step in path), reason)
    return metrics


def _seconds(step: Step) -> float:
    """The first token's time is that of `End.ttft_s`: it is there before its step is summed up."""
    timing = step.timing
    return timing.total_s if step.step else timing.forward_s + timing.sample_s


@contextmanager
def textfile(path: Path, traces: Sequence[Trace]) -> Iterator[None]:
    """Whatever ends the run inside, the metrics of its traces are written to `path`. Raises InputError."""
    finding = None
    try:
        yield
    except FindingError as fault:
        finding = fault
        raise
    finally:
        write_whole(path, metrics_of(traces, finding).exposition()[0])


def check_textfile(path: Path) -> None:
    """Refuse a file that could not be written, before any work. Raises InputError."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError("run.textfile", path=path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one whole. Raises InputError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # the collector reads names in .prom alone
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as fault:
        temporary.unlink(missing_ok=True)
        raise InputError("run.textfile_unwritten", path=path, reason=fault.strerror or fault) from None
