"""Spans and metrics of OpenTelemetry's GenAI conventions, sent by OTLP to whatever collector is configured.

Names and bounds are those of open-telemetry/semantic-conventions-genai (docs/gen-ai), all of them "development"
still. A request becomes one span, made when it has ended. The conventions have none for a model server: it is that
of an inference, of kind INTERNAL because the model runs in this process. What was asked and answered is not sent;
`gen_ai.response.id` is the run's id. Where to send is said by OpenTelemetry's own variables
(OTEL_EXPORTER_OTLP_ENDPOINT and others).
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from decodescope.errors import InputError
from decodescope.monitor.series import EACH_TOKEN_S, FIRST_TOKEN_S, REQUEST_S
from decodescope.trace.records import Run, Step, Trace

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

_NAME = "decodescope"
_TOKENS = tuple(4**power for power in range(14))  # 1 to 67 million
_GOOD = ("stop", "length")
# Of the sampling settings, those that the conventions have a name for.
_SETTINGS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


@dataclass(slots=True)
class _Begun:
    """What is known of a running request."""

    reused_tokens: int
    first_token_s: float | None = None


class Telemetry:
    """Tells OpenTelemetry's providers what a watcher is told."""

    def __init__(self, model_name: str, tracers: "TracerProvider", meters: "MeterProvider") -> None:
        self._model, self._tracers, self._meters = model_name, tracers, meters
        self._tracer = tracers.get_tracer(_NAME, version(_NAME))
        self._duration = self._histogram("gen_ai.server.request.duration", REQUEST_S)
        self._first_token = self._histogram("gen_ai.server.time_to_first_token", FIRST_TOKEN_S)
        self._each_token = self._histogram("gen_ai.server.time_per_output_token", EACH_TOKEN_S)
        self._tokens = self._histogram("gen_ai.client.token.usage", _TOKENS, "{token}")
        self._begun: dict[str, _Begun] = {}

    def _histogram(self, name: str, bounds: tuple[float, ...], unit: str = "s") -> "Histogram":
        meter = self._meters.get_meter(_NAME, version(_NAME))
        return meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)

    def joined(self, run_id: str, prompt_tokens: int, reused_tokens: int, waited_s: float) -> None:
        """A request leaves the queue."""
        self._begun[run_id] = _Begun(reused_tokens)

    def stepped(self, run_id: str, step: Step, seconds: float) -> None:
        """A token is chosen; only the first one's time is kept."""
        if step.step == 0 and run_id in self._begun:
            self._begun[run_id].first_token_s = seconds

    def ended(self, run_id: str, trace: Trace, seconds: float, reason: str) -> None:
        """A request ends after `seconds`: stop, length, abort, error or nonfinite."""
        begun = self._begun.pop(run_id, _Begun(0))
        common = _common(self._model, trace.run)
        failed = {} if reason in (*_GOOD, "abort") else {"error.type": reason}
        self._duration.record(seconds, {**common, **failed})
        self._record_tokens(trace, common)
        if reason in _GOOD and begun.first_token_s is not None:
            self._first_token.record(begun.first_token_s, common)
            later = len(trace.token_ids) - 1
            if later:
                self._each_token.record((seconds - begun.first_token_s) / later, common)
        about = {**common, **failed, **_request(trace.run), **_response(run_id, trace, begun, reason)}
        self._span(about, seconds, trace.end.error if failed and trace.end else None)

    def refused(self, reason: str) -> None:
        """A request that never joined is no inference: the conventions have nothing for it."""

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._tracers.shutdown()
        self._meters.shutdown()

    def _record_tokens(self, trace: Trace, common: Mapping[str, Any]) -> None:
        for kind, count in (("input", len(trace.run.prompt_tokens)), ("output", len(trace.token_ids))):
            self._tokens.record(count, {**common, "gen_ai.token.type": kind})

    def _span(self, about: dict[str, Any], seconds: float, error: str | None) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        ended = time.time_ns()
        name = f"{about['gen_ai.operation.name']} {self._model}"
        begun = ended - int(seconds * 1e9)
        span = self._tracer.start_span(name, kind=SpanKind.INTERNAL, attributes=about, start_time=begun)
        if "error.type" in about:
            span.set_status(StatusCode.ERROR, error or about["error.type"])
        span.end(ended)


def _common(model: str, run: Run) -> dict[str, Any]:
    chat = any(token.role != "text" for token in run.prompt_tokens)
    return {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": model,
    }


def _request(run: Run) -> dict[str, Any]:
    settings = {name: run.sampling.get(name) for name in _SETTINGS}
    given = {f"gen_ai.request.{name}": value for name, value in settings.items() if value is not None}
    stops = {"gen_ai.request.stop_sequences": run.stop_strings} if run.stop_strings else {}
    return {**given, **stops, "gen_ai.request.max_tokens": run.max_new_tokens}


def _response(run_id: str, trace: Trace, begun: _Begun, reason: str) -> dict[str, Any]:
    path = trace.path()
    mean = {"decodescope.entropy_nats.mean": sum(step.entropy_nats for step in path) / len(path)} if path else {}
    return {
        "gen_ai.response.id": run_id,
        "gen_ai.response.model": trace.run.model,
        "gen_ai.response.finish_reasons": ["error" if reason == "nonfinite" else reason],
        "gen_ai.usage.input_tokens": len(trace.run.prompt_tokens),
        "gen_ai.usage.output_tokens": len(path),
        "gen_ai.usage.cache_read.input_tokens": begun.reused_tokens,
        **mean,
    }


def telemetry_watcher(model_name: str) -> Telemetry:
    """A watcher that sends to an OTLP collector by HTTP. Raises InputError where the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InputError("monitor.no_otel") from None
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": _NAME}
    resource = Resource.create({**named, "service.version": version(_NAME)})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource)
    return Telemetry(model_name, tracers, meters)
