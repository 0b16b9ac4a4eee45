"""`decodescope serve` in a process of its own, and clients that keep asking it."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
QUESTIONS = ("Name three rivers.", "What is a cache?", "Why is the sky blue?", "Write a line about rain.")
CLIENTS = 2


@dataclass(frozen=True, slots=True)
class LiveServer:
    """Where it is, and its token."""

    address: str
    token: str

    def get(self, path: str) -> bytes:
        """The body of an answer. Raises urllib's HTTPError for a refusal."""
        return self._open(path, None)

    def post(self, path: str, **body: object) -> Json:
        """What is answered to a request. Raises urllib's HTTPError for a refusal."""
        return json.loads(self._open(path, json.dumps(body).encode()))

    def status(self, path: str, **body: object) -> int:
        """The status of a request that may be refused."""
        try:
            self.post(path, **body)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code
        return 200

    def _open(self, path: str, body: bytes | None) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()


class Starting:
    """A server that is on its way: several may load at once."""

    def __init__(self, token: str, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "decodescope", "serve", "--port", "0", "--json", *arguments]
        environment = {**os.environ, "DECODESCOPE_TOKEN": token}
        self.token, self._log = token, log
        with log.open("w") as told:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=told, text=True, env=environment
            )

    def ready(self) -> LiveServer:
        """Wait until it hears clients."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        return LiveServer(f"127.0.0.1:{json.loads(line)['port']}", self.token)

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@dataclass(slots=True)
class Told:
    """What the clients were told, to be compared with what is counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0
    refused: int = 0
    run_ids: set[str] = field(default_factory=set)


class Traffic:
    """Clients that ask one question after the other until they are stopped."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self._over, self._lock, self.told = server, threading.Event(), threading.Lock(), Told()
        self._clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def stop(self) -> Told:
        """No more questions; every answer that was asked for has come."""
        self._over.set()
        for client in self._clients:
            client.join()
        return self.told

    def _ask(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            answer = self._server.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]}],
                max_tokens=24, temperature=0.8, top_k=40, seed=turn, guards=["entropy=50:warn,window=2"],
            )  # fmt: skip
            too_long = self._server.status("/v1/completions", prompt=[1] * 9000)
            with self._lock:
                usage = answer["usage"]
                self.told.prompt_tokens += usage["prompt_tokens"]
                self.told.completion_tokens += usage["completion_tokens"]
                self.told.run_ids.add(answer["choices"][0]["run_id"])
                self.told.answers += 1
                self.told.refused += too_long == 400
            turn += CLIENTS

    def start(self) -> None:
        for client in self._clients:
            client.start()


@contextmanager
def traffic(server: LiveServer) -> Iterator[Traffic]:
    asking = Traffic(server)
    asking.start()
    try:
        yield asking
    finally:
        asking.stop()
