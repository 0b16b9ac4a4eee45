"""More planted faults, in servers of their own: each fires its alert in a real Prometheus.

Only three alerts are shown by recorded series alone (test_alerts.py): those of devices, of a machine's memory that is
nearly full, and of a server that becomes slower than it was for an hour.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from live_server import LiveServer, Starting
from prometheus_server import PrometheusServer, needs_prometheus, running_prometheus, wait_for
from safetensors.torch import load_file, save_file
from test_live_server import PACE, TOKEN

from decodescope.monitor.setup import write_setup
from tiny_model import make_tiny_model

PATIENCE_S = 60
# What the head is multiplied by: nothing is certain, or everything.
FAULTS = {"flat": 0.0, "certain": 1e4}
DRILLS = [
    ("flat", "LlmEntropyExplosion"),
    ("flat", "LlmRepetition"),
    ("certain", "LlmEntropyCollapse"),
    ("certain", "LlmTimeToFirstTokenHigh"),
]

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


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, LiveServer], PrometheusServer]]:
    root, asking = tmp_path_factory.mktemp("drills"), Asking()
    (root / "token").write_text(TOKEN)
    with ExitStack() as stack:
        starting = {}
        for name, factor in FAULTS.items():
            model = faulty_model(root / name, factor)
            options = ("-m", str(model), "--threads", "1", "--max-running", "1", "--max-waiting", "99")
            starting[name] = Starting(TOKEN, root / f"{name}.log", *options)
            stack.callback(starting[name].stop)
        servers = {name: each.ready() for name, each in starting.items()}
        addresses = {"decodescope": [server.address for server in servers.values()]}
        write_setup(root / "setup", addresses, root / "token", PACE)
        prometheus = stack.enter_context(running_prometheus(root / "setup/prometheus.yml", root / "data"))
        asking.start(servers["flat"], clients=1, tokens=32)
        asking.start(servers["certain"], clients=64, tokens=150)
        stack.callback(asking.over.set)
        yield servers, prometheus
    asking.join()


@pytest.mark.parametrize(("fault", "alert"), DRILLS)
def test_a_planted_fault_fires_its_alert(watched, fault, alert):
    servers, prometheus = watched
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing",instance="{servers[fault].address}"}}'
    wait_for(lambda: prometheus.query(firing), PATIENCE_S, f"{alert} fires")
