"""OpenTelemetry's names and values, read back with the SDK's own in-memory exporters."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from decodescope import Session
from decodescope.errors import InputError
from decodescope.monitor.series import EACH_TOKEN_S, FIRST_TOKEN_S, REQUEST_S
from decodescope.monitor.telemetry import Telemetry, telemetry_watcher
from decodescope.serving.watcher import Watcher
from decodescope.trace.records import Trace
from tiny_model import make_tiny_model

export = pytest.importorskip(
    "opentelemetry.sdk.metrics.export", reason="needs the extra otel; ends where it is installed"
)


class Sent:
    """What reached the exporters."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter, self._reader = InMemorySpanExporter(), export.InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry("m", tracers, MeterProvider([self._reader]))

    @property
    def spans(self) -> tuple:
        return self._exporter.get_finished_spans()

    @property
    def points(self) -> dict[str, list]:
        """The points of each metric; an empty reader has none."""
        data = self._reader.get_metrics_data()
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        return {metric.name: list(metric.data.data_points) for metric in metrics}


@pytest.fixture
def sent() -> Iterator[Sent]:
    made = Sent()
    yield made
    made.telemetry.close()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def trace(session: Session) -> Trace:
    return session.run(
        "Hi", temperature=0.7, top_p=0.9, top_k=40, seed=3, max_new_tokens=5, ignore_eos=True, stop=("zz",)
    )


def tell(sent: Sent, trace: Trace, reason: str = "length") -> None:
    sent.telemetry.joined("r1", len(trace.run.prompt_tokens), 3, 0.1)
    for each in trace.path():
        sent.telemetry.stepped("r1", each, 0.5 if each.step == 0 else 0.1)
    sent.telemetry.ended("r1", trace, 0.9, reason)


def test_it_is_a_watcher(sent):
    assert isinstance(sent.telemetry, Watcher)


def test_a_request_is_a_span_with_the_names_of_the_conventions(sent, trace):
    tell(sent, trace)
    (span,) = sent.spans
    about = dict(span.attributes)
    assert span.name == "chat m" and span.kind.name == "INTERNAL" and span.status.status_code.name == "UNSET"
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(0.9)
    mean = about.pop("decodescope.entropy_nats.mean")
    assert mean == pytest.approx(sum(each.entropy_nats for each in trace.path()) / 5)
    assert about == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "decodescope",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.stop_sequences": ("zz",),
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": trace.run.model,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(trace.run.prompt_tokens),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }


def test_nothing_of_what_was_asked_or_answered_is_sent(sent, session):
    trace = session.run("Xylophone", max_new_tokens=5, ignore_eos=True)
    tell(sent, trace)
    assert "Xylophone" not in sent.spans[0].to_json() and trace.text not in str(dict(sent.spans[0].attributes))


def test_a_plain_prompt_is_a_text_completion(sent, session):
    tell(sent, session.run(session.prompt("Hi", chat=False), max_new_tokens=2))
    assert sent.spans[0].name == "text_completion m"


def test_metrics_are_the_conventions_histograms_with_their_bounds(sent, trace):
    tell(sent, trace)
    points = sent.points
    expected = {
        "gen_ai.server.request.duration": (0.9, REQUEST_S),
        "gen_ai.server.time_to_first_token": (0.5, FIRST_TOKEN_S),
        "gen_ai.server.time_per_output_token": (0.1, EACH_TOKEN_S),
    }
    for name, (seconds, bounds) in expected.items():
        (point,) = points[name]
        assert (point.count, point.sum) == (1, pytest.approx(seconds)) and point.explicit_bounds == bounds
        assert point.attributes["gen_ai.operation.name"] == "chat"
        assert point.attributes["gen_ai.provider.name"] == "decodescope"
        assert point.attributes["gen_ai.request.model"] == "m"
    tokens = {point.attributes["gen_ai.token.type"]: point.sum for point in points["gen_ai.client.token.usage"]}
    assert tokens == {"input": len(trace.run.prompt_tokens), "output": 5}
    assert points["gen_ai.client.token.usage"][0].explicit_bounds[-1] == 67108864


@pytest.mark.parametrize("reason", ["error", "nonfinite"])
def test_an_error_is_named_and_tells_no_latency_of_tokens(sent, trace, reason):
    tell(sent, replace(trace, end=replace(trace.end, error="it broke")), reason)
    (span,) = sent.spans
    assert span.attributes["error.type"] == reason
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "it broke")
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert sent.points["gen_ai.server.request.duration"][0].attributes["error.type"] == reason
    assert "gen_ai.server.time_to_first_token" not in sent.points


def test_a_client_that_left_is_no_error(sent, trace):
    tell(sent, trace, "abort")
    assert "error.type" not in sent.spans[0].attributes
    assert "gen_ai.server.time_per_output_token" not in sent.points


def test_a_single_token_has_no_time_between_tokens(sent, session):
    tell(sent, session.run("Hi", max_new_tokens=1))
    assert "gen_ai.server.time_per_output_token" not in sent.points
    assert "gen_ai.server.time_to_first_token" in sent.points


def test_a_request_that_is_refused_is_no_inference(sent):
    sent.telemetry.refused("queue_full")
    assert not sent.spans and not sent.points


def test_the_watcher_sends_by_otlp_and_bears_that_nobody_listens(trace, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    telemetry = telemetry_watcher("m")
    telemetry.joined("r1", 3, 0, 0.0)
    telemetry.ended("r1", trace, 1.0, "stop")
    telemetry.close()


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InputError, match=r"decodescope\[otel\]"):
        telemetry_watcher("m")


def test_the_module_can_be_had_without_the_extra():
    script = "import sys; sys.modules['opentelemetry'] = None; import decodescope.monitor.telemetry"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
