"""A server under clients of every kind for a long time: no answer lost or mixed, nothing left over, counts add up."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest
from waiting import until

from tiny_model import make_tiny_model

TOKEN, CLIENTS = "t0ken-of-the-soak", 8
PROMPTS = [f"question {number} {'x' * (7 * number % 60)}" for number in range(12)]
LEAK = 0.02  # of the memory after the warm-up
FAULTS = re.compile(r"Traceback|ERROR|failed|never retrieved")


@dataclass
class Server:
    """One process, its log, and what it answers when it has nothing else to do."""

    url: str
    process: subprocess.Popen
    log: Path
    alone: dict[tuple[str, bool], list[int]] = field(default_factory=dict)

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def counts(self, client: httpx2.Client) -> dict[str, float]:
        """All series of the metrics page, labels but `model_name` included."""
        lines = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
        return {re.sub(r',?model_name="[^"]*",?', "", name): float(value) for name, _, value in lines}


@contextmanager
def server_of(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    log = folder / "server.log"
    command = [sys.executable, "-m", "decodescope", "serve", "-m", str(model), "--port", "0", "--json"]
    command += ["--threads", "1", *options]
    environment = {**os.environ, "DECODESCOPE_TOKEN": TOKEN}
    with log.open("w") as told:
        pipes = {"stdout": subprocess.PIPE, "stderr": told, "text": True, "env": environment}
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            try:
                yield Server(json.loads(line)["url"].partition("?")[0], process, log)
            finally:
                process.terminate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("soak") / "tiny", max_position_embeddings=2048)


def body_of(prompt: str, drawn: bool, stream: bool = False) -> dict[str, object]:
    sampling = {"temperature": 0.9, "seed": 3} if drawn else {"temperature": 0}
    return {
        "prompt": prompt,
        "max_tokens": 8,
        "return_token_ids": True,
        "stream": stream,
        "ignore_eos": True,
        **sampling,
    }


def whole(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    prompt, drawn = dice.choice(PROMPTS), dice.random() < 0.5
    answer = client.post("/v1/completions", json=body_of(prompt, drawn))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == server.alone[prompt, drawn]


def streamed(server: Server, client: httpx2.Client, dice: random.Random, pause_s: float = 0.0) -> None:
    prompt, ids = dice.choice(PROMPTS), []
    with client.stream("POST", "/v1/completions", json=body_of(prompt, False, True)) as answer:
        for line in answer.iter_lines():
            time.sleep(pause_s)
            if line.startswith("data: {"):
                ids += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
    assert ids == server.alone[prompt, False]


def slow(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    streamed(server, client, dice, pause_s=0.01)


def leaving(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    long = {**body_of(dice.choice(PROMPTS), False, True), "max_tokens": 1500}
    with client.stream("POST", "/v1/completions", json=long) as answer:
        for _, _ in zip(range(dice.randrange(6)), answer.iter_lines(), strict=False):
            pass


def bad_json(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    content = dice.choice(["{", "[]", '{"prompt": 7}', '{"prompt": "x", "nonsense": 1}', "\x00", '{"prompt": ""}'])
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def too_long(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    answer = client.post("/v1/completions", json={"prompt": [1] * dice.randrange(2048, 4000), "max_tokens": 1})
    assert answer.status_code == 400


def no_token(server: Server, client: httpx2.Client, dice: random.Random) -> None:
    answer = client.post("/v1/completions", json=body_of("x", False), headers={"Authorization": "Bearer no"})
    assert answer.status_code == 401


KINDS = {whole: 50, streamed: 15, slow: 5, leaving: 15, bad_json: 6, too_long: 6, no_token: 3}


def mixed(server: Server, requests: int, seed: int) -> Counter:
    """That many requests by clients side by side; how many there were of each kind."""
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=requests)

    def work(part: int) -> None:
        with server.client() as client:
            for number, kind in enumerate(kinds[part::CLIENTS]):
                kind(server, client, random.Random(seed * requests + number * CLIENTS + part))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    return Counter(kinds)


def soak(model: Path, folder: Path, warm_up: int, requests: int) -> None:
    with server_of(model, folder) as server, server.client() as client:
        for prompt in PROMPTS:
            for drawn in (False, True):
                (choice,) = client.post("/v1/completions", json=body_of(prompt, drawn)).json()["choices"]
                server.alone[prompt, drawn] = choice["token_ids"]
        sent = mixed(server, warm_up, 1)
        warm_bytes = server.rss_bytes
        sent += mixed(server, requests, 2)
        until(lambda: server.counts(client)["decodescope_requests_running{}"] == 0)
        grown = server.rss_bytes / warm_bytes - 1
        counts = server.counts(client)
        check_counts(counts, sent, 2 * len(PROMPTS))
        assert grown < LEAK, f"{grown:.1%} more than the {warm_bytes >> 20} MiB after the warm-up"
    assert not FAULTS.search(server.log.read_text()), server.log.read_text()


def check_counts(counts: dict[str, float], sent: Counter, first: int) -> None:
    """Every request is counted once, and every token."""
    ended = {
        how: counts[f'decodescope_request_success_total{{finished_reason="{how}"}}']
        for how in ("stop", "length", "abort", "error")
    }
    refused = {
        why: counts[f'decodescope_requests_refused_total{{reason="{why}"}}']
        for why in ("invalid", "too_long", "abandoned", "queue_full", "too_large")
    }
    answered = first + sent[whole] + sent[streamed] + sent[slow]
    assert ended["error"] == ended["stop"] == 0
    assert ended["length"] + ended["abort"] + refused["abandoned"] == answered + sent[leaving]
    assert ended["length"] >= answered
    assert (refused["invalid"], refused["too_long"]) == (sent[bad_json], sent[too_long])
    assert refused["queue_full"] == refused["too_large"] == 0
    tokens = counts["decodescope_generation_tokens_total{}"]
    assert tokens >= 8 * answered
    assert (
        tokens
        == counts["decodescope_entropy_nats_count{}"]
        == (
            counts["decodescope_time_to_first_token_seconds_count{}"]
            + counts["decodescope_inter_token_latency_seconds_count{}"]
        )
    )
    assert sum(ended.values()) == counts["decodescope_e2e_request_latency_seconds_count{}"]
    for name in ("requests_running", "requests_waiting", "kv_cache_used_bytes"):
        assert counts[f"decodescope_{name}{{}}"] == 0


def test_hundreds_of_requests_leave_nothing_behind(model, tmp_path):
    soak(model, tmp_path, 150, 300)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_ten_thousand_requests_leave_nothing_behind(model, tmp_path):
    soak(model, tmp_path, 500, 10_000)


def test_a_server_killed_under_load_loses_no_step_and_starts_again(model, tmp_path):
    runs = tmp_path / "runs"
    recording = ("--record", "all", "--runs", str(runs))
    with server_of(model, tmp_path, *recording) as server, ThreadPoolExecutor(4) as pool:

        def read(number: int) -> list[int]:
            """The ids a client saw before its line went dead."""
            ids: list[int] = []
            long = {**body_of(PROMPTS[number], False, True), "max_tokens": 1500}
            try:
                with server.client() as client, client.stream("POST", "/v1/completions", json=long) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            ids += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
                        seen[number] = len(ids)
            except httpx2.HTTPError:
                pass
            return ids

        seen = [0] * 4
        reading = [pool.submit(read, number) for number in range(4)]
        until(lambda: min(seen) > 20)
        server.process.send_signal(signal.SIGKILL)
        streams = [each.result() for each in reading]
    shown = [shown_ids(folder) for folder in sorted(runs.iterdir())]
    for ids in streams:
        assert any(ids == kept[: len(ids)] for kept in shown), "a step that a client saw is not on disk"
    with server_of(model, tmp_path, *recording) as again, again.client() as client:
        assert len(client.get("/runs").json()["runs"]) == 4
        assert client.post("/v1/completions", json=body_of("x", False)).status_code == 200


def shown_ids(folder: Path) -> list[int]:
    """What `show` says of a run."""
    command = [sys.executable, "-m", "decodescope", "show", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["finish_reason"] == "interrupted"
    return [line["token_id"] for line in lines if line["type"] == "step"]
