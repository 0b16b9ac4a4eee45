"""More planted faults, in servers of their own: each fires its alert in a real Prometheus.

With those of test_live_server.py every alert is drilled but those of devices, which are shown by recorded series
(`DEVICE_ALERTS` in test_alerts.py).
"""

import http.client
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from live_server import LiveServer, Starting
from prometheus_server import PrometheusServer, let_scrapes_take, needs_prometheus, running_prometheus, wait_for
from safetensors.torch import load_file, save_file

from decodescope.monitor.rules import Pace
from decodescope.monitor.setup import write_setup
from tiny_model import make_tiny_model

PACE, SCRAPE_S = Pace(1 / 40), 0.75  # four in a window of three seconds
PATIENCE_S = 120
TOKEN = "a-token-that-all-servers-share-and-prometheus-knows"
# What the head is multiplied by: nothing is certain, or everything, or it is as it was.
FAULTS = {"flat": 0.0, "certain": 1e4, "idle": 1.0}
DRILLS = [
    ("flat", "LlmEntropyExplosion"),
    ("flat", "LlmRepetition"),
    ("certain", "LlmEntropyCollapse"),
    ("certain", "LlmTimeToFirstTokenHigh"),
]
RUN_S, PAUSE_PER_RUN = 0.01, 3  # of a server that is slowed down: a quarter of the time is left to it

pytestmark = needs_prometheus


def faulty_model(folder: Path, factor: float) -> Path:
    make_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Asking:
    """Clients who ask again and again for so many tokens; one at a time is answered, the others wait."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._clients: list[threading.Thread] = []

    def start(self, server: LiveServer, clients: int, tokens: int) -> None:
        for _ in range(clients):
            self._clients.append(threading.Thread(target=self._ask, args=(server, tokens)))
            self._clients[-1].start()

    def join(self) -> None:
        for client in self._clients:
            client.join()

    def _ask(self, server: LiveServer, tokens: int) -> None:
        with suppress(OSError, http.client.HTTPException):  # the server has stopped
            while not self.over.is_set():
                server.post("/v1/completions", prompt="x", max_tokens=tokens, ignore_eos=True, temperature=0)


@contextmanager
def slowed_down(process: psutil.Process) -> Iterator[None]:
    """Stop a process again and again, as the kernel does with one beyond its CPU quota.

    A pause is as long as the run before it asks for: a busy machine wakes this thread late.
    """
    over = threading.Event()

    def slow_down() -> None:
        while not over.is_set():
            began = time.monotonic()
            time.sleep(RUN_S)
            process.suspend()
            time.sleep(PAUSE_PER_RUN * (time.monotonic() - began))
            process.resume()

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def at_a_standstill(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextmanager
def limited(process: psutil.Process) -> Iterator[None]:
    """Let a process have a twentieth more memory than it has (`ulimit -d`)."""
    memory = process.memory_info()
    usual = resource.prlimit(process.pid, resource.RLIMIT_DATA)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (memory.data + memory.rss // 20, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, usual)


@dataclass(frozen=True)
class Watched:
    """What runs."""

    servers: dict[str, LiveServer]
    processes: dict[str, psutil.Process]
    prometheus: PrometheusServer

    def wait(self, expr: str, server: str) -> None:
        """Until an expression, `%s` in it for the labels of a server, has a value."""
        labels = f'instance="{self.servers[server].address}"'
        wait_for(lambda: self.prometheus.query(expr % labels), PATIENCE_S, f"{expr} at {server}")

    def wait_firing(self, alert: str, server: str) -> None:
        self.wait(f'ALERTS{{alertname="{alert}",alertstate="firing",%s}}', server)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    root, asking = tmp_path_factory.mktemp("drills"), Asking()
    (root / "token").write_text(TOKEN)
    with ExitStack() as stack:
        starting = {}
        for name, factor in FAULTS.items():
            model = faulty_model(root / name, factor)
            options = ("-m", str(model), "--threads", "1", "--max-running", "1", "--max-waiting", "199")
            starting[name] = Starting(TOKEN, root / f"{name}.log", *options)
            stack.callback(starting[name].stop)
        servers = {name: each.ready() for name, each in starting.items()}
        addresses = {"decodescope": [server.address for server in servers.values()]}
        write_setup(root / "setup", addresses, root / "token", PACE)
        config = root / "setup/prometheus.yml"
        let_scrapes_take(config, SCRAPE_S)
        prometheus = stack.enter_context(running_prometheus(config, root / "data"))
        asking.start(servers["flat"], clients=1, tokens=32)
        # Many short answers: one waits for more than five seconds, and a first token comes in every window.
        asking.start(servers["certain"], clients=150, tokens=80)
        stack.callback(asking.over.set)
        processes = {name: psutil.Process(each.process.pid) for name, each in starting.items()}
        yield Watched(servers, processes, prometheus)
    asking.join()


@pytest.mark.parametrize(("fault", "alert"), DRILLS)
def test_a_planted_fault_fires_its_alert(watched, fault, alert):
    watched.wait_firing(alert, fault)


@pytest.mark.skipif(sys.platform != "linux", reason="another process can be limited on Linux only")
def test_a_process_near_its_memory_limit_fires_process_memory_nearly_full(watched):
    watched.wait("llm:process_memory_usage_ratio{%s} < 0.9", "idle")
    with limited(watched.processes["idle"]):
        watched.wait_firing("LlmProcessMemoryNearlyFull", "idle")


def test_a_server_at_a_standstill_fires_target_down(watched):
    with at_a_standstill(watched.processes["idle"]):
        watched.wait_firing("LlmTargetDown", "idle")


def test_a_server_that_is_given_less_time_fires_throughput_drop(watched):
    watched.wait("llm:tokens_per_second_per_request:usual{%s}", "flat")
    with slowed_down(watched.processes["flat"]):
        watched.wait_firing("LlmThroughputDrop", "flat")
