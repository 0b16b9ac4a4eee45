"""A real Prometheus beside live servers: real answers fill the dashboard, and planted faults fire the alerts.

One server has the starter model, recorded runs and a small cache; the other one a tiny model whose weights are finite
and whose logits overflow, for one with NaN in its weights is never served: loading refuses it. Everything that takes
minutes takes half-seconds here (`Pace`). All other alerts but those of devices are drilled in test_live_drills.py.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_server import LiveServer, Starting, Traffic, traffic
from panel_queries import SANE, asked
from prometheus_server import PrometheusServer, let_scrapes_take, needs_prometheus, running_prometheus, wait_for
from safetensors.torch import load_file, save_file

from decodescope.monitor.dashboard_panels import ROWS, Panel
from decodescope.monitor.rules import Pace
from decodescope.monitor.setup import write_setup
from tiny_model import make_tiny_model

PACE, SCRAPE_S = Pace(1 / 120), 0.25  # four in a window of a second
PATIENCE_S = 40
TOKEN = "a-token-that-both-servers-share-and-prometheus-knows"
POSITION_BYTES = 24 * 2 * 2 * 64 * 4  # of the starter model: layers, keys and values, heads, their size, float32
CACHE_POSITIONS = 250
ONES = "1 " * 16  # the model goes on with it
# Without a device, and where nothing is wrong, these have nothing to show.
EMPTY_HERE = {panel.key for row in ROWS.values() for panel in row if panel.needs_device} | {"alerts"}
PANELS = {panel.key: panel for row in ROWS.values() for panel in row if panel.key not in EMPTY_HERE}
# Seconds in which another process takes the machine are a drop in speed, at this pace.
MACHINE_IS_SHARED = {"LlmThroughputDrop", "LlmTimeToFirstTokenHigh"}

pytestmark = needs_prometheus


@dataclass(frozen=True)
class Watched:
    """What runs."""

    healthy: LiveServer
    broken: LiveServer
    prometheus: PrometheusServer
    traffic: Traffic

    def samples(self, expr: str, server: LiveServer) -> list[float]:
        """The values of an expression's series that come from one server."""
        return [value for labels, value in self.prometheus.query(expr) if labels["instance"] == server.address]

    def wait_fired(self, name: str, server: LiveServer, began: float) -> None:
        """Until an alert has fired since `began` (of the monotonic clock): when we look it may be over again."""
        firing = f'ALERTS{{alertname="{name}",alertstate="firing",instance="{server.address}"}}'
        wait_for(
            lambda: self.prometheus.query(f"last_over_time({firing}[{1000 * (time.monotonic() - began):.0f}ms])"),
            PATIENCE_S,
            f"{name} fires",
        )


def damaged_model(folder: Path) -> Path:
    """Weights that are finite, or they would not load, and so large that the logits are not."""
    make_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):
        weights[name] *= 1e30
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def watched(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    root = tmp_path_factory.mktemp("live")
    damaged = damaged_model(root / "damaged")
    (root / "token").write_text(TOKEN)
    with ExitStack() as stack:
        cache = str(CACHE_POSITIONS * POSITION_BYTES)
        recorded = ("--record", "all", "--runs", str(root / "runs"))
        starting = [
            Starting(
                TOKEN,
                root / "healthy.log",
                "-m",
                str(starter_path),
                "--cache-bytes",
                cache,
                "--threads",
                "1",
                *recorded,
            ),
            Starting(TOKEN, root / "damaged.log", "-m", str(damaged), "--threads", "1"),
        ]
        for each in starting:
            stack.callback(each.stop)
        healthy, broken = (each.ready() for each in starting)
        addresses = {"decodescope": [healthy.address, broken.address]}
        write_setup(root / "setup", addresses, root / "token", PACE)
        config = root / "setup/prometheus.yml"
        let_scrapes_take(config, SCRAPE_S)
        prometheus = stack.enter_context(running_prometheus(config, root / "data"))
        wait_for(lambda: prometheus.query("llm:nonfinite_logits:increase"), PATIENCE_S, "both are scraped")
        yield Watched(healthy, broken, prometheus, stack.enter_context(traffic(healthy)))


def test_both_servers_are_up(watched):
    both = {watched.healthy.address: "up", watched.broken.address: "up"}
    wait_for(lambda: watched.prometheus.targets() == both, PATIENCE_S, "two targets up")


@pytest.mark.parametrize("key", PANELS)
def test_real_traffic_fills_every_panel_with_sane_values(watched, key):
    panel: Panel = PANELS[key]
    least, most = SANE[panel.unit]
    for query in panel.queries:
        samples = wait_for(
            lambda query=query: watched.prometheus.query(asked(query.expr, PACE)), PATIENCE_S, query.expr
        )
        assert all(least <= value <= most for _, value in samples), (query.expr, samples)


def test_a_healthy_server_fires_nothing(watched):
    assert watched.prometheus.firing() - MACHINE_IS_SHARED == set()


def test_an_exemplar_leads_to_the_run_it_came_from(watched):
    (query,) = PANELS["entropy"].queries
    named = wait_for(lambda: watched.prometheus.exemplars(asked(query.expr, PACE)), PATIENCE_S, "exemplars")
    run_id = named[0]["run_id"]
    assert run_id.encode() in watched.healthy.get(f"/runs/{run_id}")


def test_what_is_counted_is_what_the_clients_were_told(watched):
    """To the token; the warm-up is theirs too, for there was no other client."""
    told = watched.traffic.stop()
    assert told.answers >= 2 and told.refused == told.answers
    for name, expected in (
        ("prompt_tokens_total", told.prompt_tokens),
        ("generation_tokens_total", told.completion_tokens),
        ("time_to_first_token_seconds_count", told.answers),
        ("inter_token_latency_seconds_count", told.completion_tokens - told.answers),
        ("entropy_nats_count", told.completion_tokens),
        ("e2e_request_latency_seconds_count", told.answers),
        ("request_success_total", told.answers),
        ("requests_refused_total", told.refused),
    ):
        expr = f"sum by (instance) (decodescope_{name})"
        wait_for(
            lambda expr=expr, n=expected: watched.samples(expr, watched.healthy) == [n],
            PATIENCE_S,
            f"{name} = {expected}",
        )


def test_logits_that_overflow_fire_non_finite_logits(watched):
    began = time.monotonic()
    assert watched.broken.status("/v1/completions", prompt="x", max_tokens=4) == 500
    watched.wait_fired("LlmNonfiniteLogits", watched.broken, began)


def test_a_cache_that_is_too_small_fires_kv_cache_nearly_full(watched):
    """A prompt that takes 91 % of it, and an answer that takes nearly all of the rest, for half a second or more."""
    prompt = [7, 11, 13, 17, 19] * (CACHE_POSITIONS * 91 // 500)
    new, began = CACHE_POSITIONS * 8 // 100, time.monotonic()
    answer = watched.healthy.post(
        "/v1/completions", prompt=prompt, max_tokens=new, ignore_eos=True, temperature=1.0
    )
    assert answer["usage"]["completion_tokens"] == new
    watched.wait_fired("LlmKvCacheNearlyFull", watched.healthy, began)


def test_an_answer_in_circles_fires_loops(watched):
    began = time.monotonic()
    answer = watched.healthy.post("/v1/completions", prompt=ONES, max_tokens=64, ignore_eos=True, temperature=0)
    assert answer["usage"]["completion_tokens"] == 64
    watched.wait_fired("LlmLoops", watched.healthy, began)
