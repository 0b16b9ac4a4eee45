"""Metrics: what a server's requests and steps come to, counted as they happen, for Prometheus to fetch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import product
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from decodescope.analysis.guard_rules import GuardName
from decodescope.analysis.repeats import LoopFinder
from decodescope.analysis.repetition import repetition_rate
from decodescope.monitor import series as s
from decodescope.monitor.machine import Figure, machine_figures
from decodescope.trace.records import Action, Step, Trace

Gauges = Callable[[], Mapping[str, float]]
Measure = Callable[[], Iterable[Figure]]
Observe = Callable[[float, dict[str, str]], None]
_OPENMETRICS = "application/openmetrics-text"
_LEAST_TOKENS = 4  # of an answer whose repetition is measured
_KNOWN_LABELS = (
    *product(["request_success_total"], s.FINISHED_REASONS),
    *product(["requests_refused_total"], s.REFUSED_REASONS),
    *product(["guard_interventions_total"], get_args(GuardName), get_args(Action)),
)
disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which nobody reads


class Metrics:
    """Counters and histograms of `series`, told by the methods of a watcher; gauges are measured when fetched.

    `gauges` gives the values of `series.SERVING_GAUGES`, `measure` those of process and devices. Any thread may
    fetch or refuse; the watcher's other methods are called in one. What they cost: `benchmarks/metrics.py`.
    """

    def __init__(self, model_name: str, gauges: Gauges | None = None, measure: Measure = machine_figures) -> None:
        self._registry, self._model = CollectorRegistry(), model_name
        self._counters = {each.name: self._counter(each) for each in s.COUNTERS}
        self._count = {
            each.name: self._counters[each.name].labels(model_name) for each in s.COUNTERS if not each.labels
        }
        self._seen = {each.name: self._histogram(each) for each in s.HISTOGRAMS}
        for name, *values in _KNOWN_LABELS:  # there from the start: Prometheus sees no increase in a new series
            self._counters[name].labels(model_name, *values)
        self._finders: dict[str, LoopFinder | None] = {}  # of the running requests; None of those that have looped
        self._registry.register(_Measured(model_name, gauges, measure))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All series as text, and its content type; OpenMetrics, which has exemplars, where `accept` names it."""
        if any(part.split(";")[0].strip() == _OPENMETRICS for part in accept.split(",")):
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _counter(self, series: s.Series) -> Counter:
        return Counter(series.full_name, series.help, (s.MODEL, *series.labels), registry=self._registry)

    def _histogram(self, series: s.Series) -> Observe:
        made = Histogram(
            series.full_name, series.help, (s.MODEL,), registry=self._registry, buckets=series.buckets
        )
        observe: Observe = made.labels(self._model).observe
        return observe

    def joined(self, run_id: str, prompt_tokens: int, reused_tokens: int, waited_s: float) -> None:
        """A request leaves the queue; `reused_tokens` of its prompt are in the cache already."""
        self.began(prompt_tokens)
        self._count["prefix_cache_query_tokens_total"].inc(prompt_tokens)
        self._count["prefix_cache_hit_tokens_total"].inc(reused_tokens)
        self._seen["request_queue_time_seconds"](waited_s, {"run_id": run_id})

    def began(self, prompt_tokens: int) -> None:
        """A run begins that knows no queue and no prefix cache."""
        self._count["prompt_tokens_total"].inc(prompt_tokens)

    def stepped(self, run_id: str, step: Step, seconds: float) -> None:
        """A token is chosen, `seconds` after the one before; the first one after the request came."""
        run, seen = {"run_id": run_id}, self._seen
        seen["inter_token_latency_seconds" if step.step else "time_to_first_token_seconds"](seconds, run)
        self._count["generation_tokens_total"].inc()
        seen["entropy_nats"](step.entropy_nats, run)
        seen["chosen_probability"](step.prob, run)
        if math.isfinite(step.margin_logits):  # of a single token there is none
            seen["margin_logits"](step.margin_logits, run)
        if step.stages:
            seen["kept_mass"](math.prod(stage.kept_mass for stage in step.stages), run)
        for each in step.interventions:
            self._counters["guard_interventions_total"].labels(self._model, each.guard, each.action).inc()
        self._look_for_loop(run_id, step)

    def ended(self, run_id: str, trace: Trace, seconds: float, reason: str) -> None:
        """A request ends after `seconds`: stop, length, abort, error, or nonfinite, which is an error too."""
        self._finders.pop(run_id, None)
        if reason == "nonfinite":
            self._count["nonfinite_logits_total"].inc()
        finished = "error" if reason == "nonfinite" else reason
        self._counters["request_success_total"].labels(self._model, finished).inc()
        run = {"run_id": run_id}
        self._seen["e2e_request_latency_seconds"](seconds, run)
        ids = trace.token_ids
        rate = repetition_rate(ids) if reason in ("stop", "length") and len(ids) >= _LEAST_TOKENS else None
        if rate is not None:
            self._seen["repetition_ratio"](rate, run)

    def refused(self, reason: str) -> None:
        """A request is turned away, or leaves while it waits: `series.REFUSED_REASONS`."""
        self._counters["requests_refused_total"].labels(self._model, reason).inc()

    def _look_for_loop(self, run_id: str, step: Step) -> None:
        """A loop is told at the token that makes it one; at the end it may be over."""
        if run_id not in self._finders:
            self._finders[run_id] = LoopFinder()
        finder = self._finders[run_id]
        if finder is None:
            return
        finder.push(step.token_id, step.text)
        if finder.loop:
            self._count["loops_detected_total"].inc()
            self._finders[run_id] = None


class _Measured(Collector):
    """The gauges, each measured when fetched; a series without a value is not there at all."""

    def __init__(self, model_name: str, gauges: Gauges | None, measure: Measure) -> None:
        self._model, self._gauges, self._measure = model_name, gauges, measure

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family for each gauge that has a value now."""
        families: dict[str, GaugeMetricFamily] = {}
        by_name = {each.name: each for each in s.GAUGES}
        for name, labels, value in self._figures():
            series = by_name[name]
            if name not in families:
                families[name] = GaugeMetricFamily(series.full_name, series.help, labels=(s.MODEL, *series.labels))
            families[name].add_metric((self._model, *labels), value)
        yield from families.values()

    def _figures(self) -> Iterator[Figure]:
        served = self._gauges() if self._gauges else {}
        for each in s.SERVING_GAUGES:
            if each.name in served:
                yield each.name, (), served[each.name]
        yield from self._measure()
        yield s.BUILD_INFO.name, (version("decodescope"), version("torch")), 1
