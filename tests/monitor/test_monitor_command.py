"""`decodescope monitor`: what it shows, what it says when it cannot, and that strangers' text does no harm."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exposed import growing, llama_server, sends, served, step, vllm

from decodescope.cli.main import main
from decodescope.monitor.metrics import Metrics


def monitor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["monitor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(text: str) -> dict[str, str]:
    """Label and value of each row: two spaces or more between them."""
    parts = [[part.strip() for part in line.split("  ") if part.strip()] for line in text.splitlines()]
    return dict(part for part in parts if len(part) == 2)


def test_vllm_is_shown_and_what_it_does_not_tell_is_unavailable_never_zero(capsys):
    with served(sends(growing(lambda at: vllm(100 * at, 10 * at, 40 * at)))) as address:
        code, out, _ = monitor(capsys, address, "--once", "--every", "0.2")
    shown = rows(out)
    assert code == 0
    assert f"http://{address}/metrics · vLLM · Qwen/Qwen2.5-7B-Instruct" in out
    assert 0 < float(shown["tokens/s"]) <= 500
    assert shown["requests running / waiting"] == "3 / 2"
    assert shown["first token, p50 / p95 (estimates)"] == "250.0 ms / 475.0 ms"
    assert shown["KV cache in use"] == "97.0 %"
    assert shown["prompt tokens from the cache"] == "40.0 %"
    for label in (
        "entropy, mean in nats",
        "loops / answers begun",
        "non-finite logits",
        "of the memory it may have",
    ):
        assert shown[label] == "unavailable"
    assert "! not for long yet: LlmKvCacheNearlyFull: The KV cache of" in out
    assert "Not told here, for want of a long history: LlmThroughputDrop." in " ".join(out.split())


def test_llama_server_has_no_times(capsys):
    with served(sends(growing(lambda at: llama_server(100 * at)))) as address:
        _, out, _ = monitor(capsys, address, "--once", "--every", "0.2")
    shown = rows(out)
    assert shown["first token, p50 / p95 (estimates)"] == shown["KV cache in use"] == "unavailable"
    assert shown["requests running / waiting"] == "1 / 0"
    assert "no alerts" in out


def test_our_own_server_tells_of_entropy(capsys):
    metrics = Metrics("ours", lambda: {"requests_running": 1, "requests_waiting": 0})

    def page() -> bytes:
        metrics.joined("a", 10, 4, 0.1)
        metrics.stepped("a", step(0, entropy_nats=1.5), 0.2)
        return metrics.exposition()[0]

    with served(sends(page)) as address:
        _, out, _ = monitor(capsys, address, "--once", "--every", "0.2")
    shown = rows(out)
    assert shown["entropy, mean in nats"] == "1.500"
    assert shown["loops / answers begun"] == "0 / 1"
    assert shown["prompt tokens from the cache"] == "40.0 %"
    assert shown["repeated 4-grams, mean"] == "–", "no answer has ended yet"
    assert shown["KV cache in use"] == "unavailable"


def test_json_is_a_line_a_look_and_null_is_what_is_unavailable(capsys):
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        code, out, _ = monitor(capsys, "--json", "--once", "--every", "0.2", address)
    (line,) = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and line["server"] == "vLLM" and line["fault"] is None
    assert line["figures"]["requests_running"] == 3
    assert line["figures"]["entropy_nats_mean"] is None and "entropy_nats_mean" in line["figures"]["unavailable"]
    assert line["figures"]["ttft_p50_s"] is None and "ttft_p50_s" not in line["figures"]["unavailable"]
    assert line["alerts"][0]["name"] == "LlmKvCacheNearlyFull"


def test_it_speaks_chinese(capsys):
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        _, out, _ = monitor(capsys, address, "--once", "--every", "0.2", "--lang", "zh")
    assert "请求：运行中 / 等待中" in out and "不可用" in out


def test_a_strangers_text_commands_no_terminal(capsys):
    evil = vllm().replace("Qwen/Qwen2.5-7B-Instruct", "\x1b[2J\u202e[red]x[/red]")
    with served(sends(lambda: evil)) as address:
        _, out, _ = monitor(capsys, address, "--once", "--every", "0.2")
        _, line, _ = monitor(capsys, address, "--once", "--every", "0.2", "--json")
    assert "\x1b" not in out and "\u202e" not in out and "[red]x[/red]" in out
    assert "\x1b" not in line and "\u202e" not in line


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("ftp://h",), "no address"),
        (("h:1", "--every", "0"), "--every must be"),
        (("h:1", "--every", "nan"), "--every must be"),
        (("h:1", "--token", "a", "--token-file", "b"), "not both"),
        (("h:1", "--token-file", "no such file"), "cannot be read"),
        (("127.0.0.1:9", "--once"), "Nothing can be had"),
        (("127.0.0.1:9",), "Nothing can be had"),
        (("--once",), "Missing argument"),
    ],
)
def test_wrong_use_is_one_sentence(capsys, arguments, says):
    code, out, err = monitor(capsys, *arguments)
    assert code == 2 and not out
    assert says in err and len(err.splitlines()) == 1 and err.startswith("decodescope: error: ")


def test_a_token_in_a_file_opens_the_door(capsys, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")

    def answer(request) -> None:
        allowed = request.headers["Authorization"] == "Bearer s3cret"
        sends(llama_server, 200 if allowed else 401)(request)

    with served(answer) as address:
        assert monitor(capsys, address, "--once", "--every", "0.2", "--token-file", tmp_path / "token")[0] == 0
        code, out, err = monitor(capsys, f"http://{address}/?token=wr0ng", "--once")
    assert code == 2 and "--token-file" in err and "wr0ng" not in out + err


def test_what_is_no_command_is_what_to_watch_and_help_names_both(capsys):
    code, out, _ = monitor(capsys, "--help")
    assert code == 0 and "watch" in out and "init" in out
    assert "--once" in monitor(capsys, "watch", "--help")[1]
    assert "DIR" in monitor(capsys, "init", "--help")[1]


def test_init_writes_a_folder(capsys, tmp_path):
    assert monitor(capsys, "init", tmp_path / "watch")[0] == 0
    assert (tmp_path / "watch" / "prometheus.yml").exists()


COMMAND = [sys.executable, "-m", "decodescope", "monitor"]


def test_ctrl_c_is_how_it_ends():
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        command = [*COMMAND, address, "--every", "0.2", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert [line["step_s"] > 0 for line in lines] == [False, True, True]


def test_on_a_terminal_it_draws_in_place():
    """In a pseudo-terminal: the second drawing goes over the first."""
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        leader, follower = pty.openpty()
        command = [*COMMAND, address, "--every", "0.2"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
        os.close(follower)
        seen, ends = "", time.monotonic() + 30
        while seen.count("tokens/s") < 3 and time.monotonic() < ends:
            seen += os.read(leader, 1 << 16).decode("utf-8", "replace")
        process.send_signal(signal.SIGINT)
        process.wait(30)
        os.close(leader)
    assert process.returncode == 0
    assert "\x1b[1A" in seen and "vLLM" in seen


def test_looking_needs_neither_torch_nor_numpy():
    script = (
        "import sys; from decodescope.cli.main import main; main(['monitor', sys.argv[1], '--once', '--every', '0.2']);"
        "assert not {'torch', 'numpy', 'fastapi'} & set(sys.modules)"
    )
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        subprocess.run([sys.executable, "-c", script, address], check=True, timeout=60, capture_output=True)
