"""A real Prometheus with the written configuration: it takes all engines in, and fills every panel and every rule.

Our own metrics come from the real collector, told of the steps of a real run again and again; accelerators are made
up. What a live server tells is shown in test_live_server.py.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from engine_pages import llamacpp, served, sglang, vllm
from panel_queries import SANE, asked
from prometheus_server import PrometheusServer, needs_prometheus, running_prometheus, wait_for

from decodescope import Session
from decodescope.monitor.dashboard_panels import ROWS, Panel
from decodescope.monitor.machine import Figure, process_figures
from decodescope.monitor.metrics import Metrics
from decodescope.monitor.rules import ENGINES, Pace, recording_groups
from decodescope.monitor.setup import write_setup
from decodescope.trace.records import Intervention, Trace
from tiny_model import make_tiny_model

PACE = Pace(1 / 60)  # a scrape every quarter of a second, rates over two
PANELS = {panel.key: panel for row in ROWS.values() for panel in row}
pytestmark = needs_prometheus


def figures() -> Iterator[Figure]:
    for name, value in process_figures().items():
        yield name, (), value
    for name, value in (("memory_used_bytes", 6e9), ("memory_peak_bytes", 5e9), ("memory_total_bytes", 8e9)):
        yield f"device_{name}", ("cuda:0",), value
    for name, value in (("temperature_celsius", 55), ("power_watts", 210), ("utilization_ratio", 0.8)):
        yield f"device_{name}", ("cuda:0",), value


def gauges() -> dict[str, float]:
    return {
        "requests_running": 2,
        "requests_waiting": 1,
        "kv_cache_used_bytes": 3e6,
        "kv_cache_reserved_bytes": 5e6,
        "kv_cache_capacity_bytes": 8e6,
    }


@contextmanager
def traffic(metrics: Metrics, trace: Trace) -> Iterator[None]:
    """One run after the other, a token every few milliseconds; a guard looks at every first one."""
    over = threading.Event()
    warned = Intervention("loop", "warn", 64, 64, None)

    def go() -> None:
        for number in count():
            run_id = f"run-{number}"
            metrics.joined(run_id, 20, 5, 0.01)
            for step in trace.steps:
                shown = step if step.step else replace(step, interventions=(warned,))
                metrics.stepped(run_id, shown, 0.05 if step.step else 0.2)
                if over.wait(0.004):
                    return
            metrics.ended(run_id, trace, 0.5, "stop")
            metrics.refused("too_long")

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """It has watched all engines for longer than the rules look back."""
    root = tmp_path_factory.mktemp("prometheus")
    session = Session.open(str(make_tiny_model(root / "model")))
    trace = session.run("Hi", max_new_tokens=24, seed=1, temperature=0.9, top_k=20, ignore_eos=True)
    metrics = Metrics("tiny", gauges, figures)
    (root / "token").write_text("a-token\n")
    pages = {"decodescope": metrics.exposition, "vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}
    with ExitStack() as stack:
        stack.enter_context(traffic(metrics, trace))
        addresses = {
            name: [stack.enter_context(served(page, "a-token" if name == "decodescope" else None))]
            for name, page in pages.items()
        }
        write_setup(root / "setup", addresses, root / "token", PACE)
        server = stack.enter_context(running_prometheus(root / "setup/prometheus.yml", root / "data"))
        past = "llm:tokens_per_second:usual > 0"
        wait_for(lambda: len(server.query(past)) == len(ENGINES), 60, "the usual speed of four engines")
        wait_for(server.firing, 20, "an alert")
        yield server


def test_every_target_is_up_and_the_token_opened_ours(prometheus):
    assert list(prometheus.targets().values()) == ["up"] * len(ENGINES)


@pytest.mark.parametrize("key", PANELS)
def test_every_query_of_a_panel_gives_sane_values(prometheus, key):
    panel: Panel = PANELS[key]
    for query in panel.queries:
        samples = prometheus.query(asked(query.expr, PACE))
        assert samples, query.expr
        least, most = SANE[panel.unit]
        assert all(least <= value <= most for _, value in samples), (query.expr, samples)
        assert all(set(query.by) <= labels.keys() for labels, _ in samples)


def test_every_rule_is_evaluated_without_a_fault(prometheus):
    health = prometheus.rules()
    assert set(health) >= {rule["record"] for rule in recording_groups(PACE)[0]["rules"]}
    assert set(health.values()) == {"ok"}


def test_each_engine_has_the_speed_it_was_given(prometheus):
    """Pages that count four tokens every tenth of a second: 40 a second, within what a scrape's jitter does."""
    speeds = {labels["engine"]: value for labels, value in prometheus.query("llm:tokens_per_second")}
    for engine in ("vllm", "sglang", "llamacpp"):
        assert speeds[engine] == pytest.approx(40, rel=0.2)
    ratios = {labels["engine"]: value for labels, value in prometheus.query("llm:prefix_cache_hit_ratio")}
    assert ratios == pytest.approx(dict.fromkeys(ENGINES, 0.25), rel=0.1)


def test_means_and_quantiles_are_those_of_the_steps(prometheus):
    """Latencies were told as 0.2 and 0.05 s, so they lie in the buckets that end or begin there."""
    ours = {"job": "decodescope"}
    (ttft,) = [
        value for labels, value in prometheus.query("llm:ttft_seconds:p50") if ours.items() <= labels.items()
    ]
    (gap,) = [
        value
        for labels, value in prometheus.query("llm:inter_token_seconds:p95")
        if ours.items() <= labels.items()
    ]
    assert 0.1 <= ttft <= 0.25
    assert 0.025 <= gap <= 0.05
    ((_, entropy),) = prometheus.query("llm:entropy_nats:mean")
    assert 0 < entropy < 5.6  # ln 260 at most


def test_exemplars_name_runs(prometheus):
    for query in PANELS["entropy"].queries:
        labels = prometheus.exemplars(asked(query.expr, PACE))
        assert labels and all(label["run_id"].startswith("run-") for label in labels)


def test_a_range_is_answered_too(prometheus):
    found = prometheus.query_range("llm:requests_running", 2, 0.25)
    assert len(found) == len(ENGINES)
    assert all(len(values) >= 6 for _, values in found)


def test_random_weights_fire_the_alert_of_a_guessing_model_and_no_other(prometheus):
    assert prometheus.firing() == {"LlmEntropyExplosion"}


def test_a_wrong_token_and_a_dead_server_fire_target_down(tmp_path: Path):
    """At a pace where the minute of patience is a tenth of a second."""
    (tmp_path / "token").write_text("wrong")
    with served(llamacpp) as alive, served(llamacpp, "right") as closed:
        write_setup(
            tmp_path / "setup",
            {"decodescope": [closed, "127.0.0.1:9"], "llamacpp": [alive]},
            tmp_path / "token",
            Pace(1 / 600),
        )
        with running_prometheus(tmp_path / "setup/prometheus.yml", tmp_path / "data") as server:
            health = {alive: "up", closed: "down", "127.0.0.1:9": "down"}
            wait_for(lambda: server.targets() == health, 20, "two targets are down")
            firing = 'ALERTS{alertname="LlmTargetDown",alertstate="firing"}'
            down = {closed, "127.0.0.1:9"}
            wait_for(lambda: {labels["instance"] for labels, _ in server.query(firing)} == down, 20, "two alerts")
