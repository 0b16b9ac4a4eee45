"""`decodescope serve` as a program: says where it is, serves, stops cleanly."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from decodescope.cli.main import main
from decodescope.trace.saved import read_trace
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("program") / "tiny", max_position_embeddings=1 << 17))


class Program:
    """A server in a process of its own; `serving` is its line on standard output."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "decodescope",
            "serve",
            "--port",
            "0",
            "--json",
            "--threads",
            "1",
            *arguments,
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}
        )
        assert self.process.stdout is not None
        self.serving = json.loads(self.process.stdout.readline())

    def open(self, path: str, token: str, body: dict | None = None):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.serving['port']}/{path}"
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60)

    def stop(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_told_and_what_runs_ends_as_interrupted(tiny, tmp_path, number):
    token_file, runs = tmp_path / "token", tmp_path / "runs"
    program = Program("-m", tiny, "--token-file", str(token_file), "--record", "all", "--runs", str(runs))
    token = token_file.read_text()
    assert program.serving["type"] == "serving" and program.serving["url"].endswith(f"/?token={token}")
    with program.open(
        "v1/completions", token, {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    ) as stream:
        assert stream.readline().startswith(b"data: ")
        code, err = program.stop(number)
        assert b"stopping" in stream.read()
    assert code == 0, err
    assert "Traceback" not in err and program.serving["url"] in err
    (run,) = runs.iterdir()
    assert read_trace(run).end.finish_reason == "interrupted"


class Collector(BaseHTTPRequestHandler):
    """Takes what OpenTelemetry sends."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self):
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_given_token_is_never_written_and_telemetry_goes_where_opentelemetrys_own_variable_says(tiny, collector):
    token = "a-token-of-some-length"
    program = Program("-m", tiny, "--otel", DECODESCOPE_TOKEN=token, OTEL_EXPORTER_OTLP_ENDPOINT=collector)
    with program.open("v1/completions", token, {"prompt": "x", "max_tokens": 2}) as answer:
        run_id = json.load(answer)["choices"][0]["run_id"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        program.open("v1/models", "wrong")
    with urllib.request.urlopen(
        f"http://127.0.0.1:{program.serving['port']}/health?token={token}", timeout=60
    ) as answer:
        assert answer.read() == b'{"status": "ok"}'
    _, err = program.stop(signal.SIGINT)
    assert token not in err and token not in json.dumps(program.serving)
    assert {path for path, _ in Collector.received} == {"/v1/traces", "/v1/metrics"}
    assert any(run_id.encode() in body for _, body in Collector.received)
    assert not any(token.encode() in body for _, body in Collector.received)


@pytest.mark.parametrize("arguments, words", [
    (["--host", "0.0.0.0"], "DECODESCOPE_TOKEN"),
    (["--cache-bytes", "many"], "--cache-bytes"),
    (["--record", "some"], "some"),
    (["--guard", "nonsense"], "nonsense"),
    (["--max-running", "0"], "0"),
    (["--engine", "vllm"], "vllm"),
    (["--allow-host", "http://x"], "allow-host"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_the_model_is_loaded(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("DECODESCOPE_TOKEN", raising=False)
    assert (
        main(
            [
                "serve",
                "-m",
                str(tmp_path / "no-model"),
                "--runs",
                str(tmp_path / "runs"),
                "--port",
                "0",
                *arguments,
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("decodescope: error: ") and words in line
