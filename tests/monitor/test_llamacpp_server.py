"""A real llama.cpp server, watched: what it exports is read as the rules and `monitor` say it is."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_server import let_scrapes_take, needs_prometheus, running_prometheus, wait_for
from test_live_server import PACE, SCRAPE_S

from decodescope.cli.main import main
from decodescope.monitor.readings import Between, figures_of
from decodescope.monitor.scrape import address_of, scrape
from decodescope.monitor.setup import write_setup

xllamacpp = pytest.importorskip(
    "xllamacpp", reason="llama.cpp in process cannot be imported; ends where the package index has a wheel for this platform"
)  # fmt: skip

PROMPT, TOKENS = "The old man and the boy sat by the sea and looked at the boats.", 24


class Llama:
    """A llama.cpp server in this process, and a client that asks it."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.hostnames, params.port, params.endpoint_metrics = ["127.0.0.1"], 0, True
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 512, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)
        self.address = self._server.listening_address.removeprefix("http://")
        self.over = threading.Event()

    def ask(self) -> int:
        """Tokens of an answer."""
        asked = {"prompt": PROMPT, "n_predict": TOKENS, "ignore_eos": True, "cache_prompt": True}
        request = urllib.request.Request(
            f"http://{self.address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def keep_asking(self) -> None:
        while not self.over.is_set():
            self.ask()


@pytest.fixture(scope="module")
def llama(small_path: Path) -> Llama:
    return Llama(small_path)


@pytest.fixture
def busy(llama: Llama) -> Iterator[Llama]:
    llama.over.clear()
    client = threading.Thread(target=llama.keep_asking)
    client.start()
    yield llama
    llama.over.set()
    client.join()


def test_tokens_and_hits_between_two_looks_are_those_of_the_answers(llama):
    llama.ask()
    old = scrape(address_of(llama.address))
    counted = sum(llama.ask() for _ in range(3))
    new = scrape(address_of(llama.address))
    figures = figures_of(Between(new, old), Between(new, old))
    assert new.server.name == "llama-server"
    assert figures.tokens_per_s == pytest.approx(counted / (new.at - old.at))
    assert figures.prefix_hit_ratio is not None and 0.5 < figures.prefix_hit_ratio < 1  # the same prompt again
    assert figures.requests_running == 0


def test_monitor_shows_it(busy, capsys):
    assert main(["monitor", busy.address, "--once", "--every", "1"]) == 0
    out = capsys.readouterr().out
    assert f"http://{busy.address}/metrics · llama-server" in out
    assert "no alerts" in out


@needs_prometheus
def test_the_rules_of_a_real_prometheus_find_its_tokens(busy, tmp_path):
    write_setup(tmp_path / "setup", {"llamacpp": [busy.address]}, None, PACE)
    config = tmp_path / "setup/prometheus.yml"
    let_scrapes_take(config, SCRAPE_S)
    with running_prometheus(config, tmp_path / "data") as prometheus:
        found = wait_for(lambda: prometheus.query('llm:tokens_per_second{job="llamacpp"} > 0'), 30, "tokens/s")
        assert found[0][0]["instance"] == busy.address
        wait_for(lambda: prometheus.query('llm:requests_running{job="llamacpp"}'), 30, "requests")
