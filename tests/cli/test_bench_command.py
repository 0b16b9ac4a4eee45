"""`bench`: one document, tables in both languages, the picture, what is refused, Ctrl-C. No figure of time is asserted."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import psutil
import pytest

from decodescope.cli import bench_view
from decodescope.experiments.bench.plan import AXES

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "bench.json"
SMALL = ("-n", "3", "--context", "8,100", "--batch", "1,3", "--prefill", "5", "--threads", "1")
ONCE, TWICE = (*SMALL, "--rounds", "1"), (*SMALL, "--rounds", "2")


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


@pytest.fixture(scope="module")
def document(tiny: str) -> dict:
    """Every axis of ours, once."""
    axes = "context,batch,recording,prefill,cache,format"
    command = ["bench", "-m", tiny, "--quick", *TWICE, "--only", axes, "--formats", "bfloat16", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "decodescope", *command], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return checked(done.stdout)


def of(rows: list[dict], axis: str) -> list[dict]:
    return [row for row in rows if row["axis"] == axis]


def test_every_axis_varies_one_thing(document):
    decode = document["decode"]
    assert [(row["context"], row["filled"]) for row in of(decode, "context")] == [(8, False), (100, True)]
    assert [row["batch"] for row in of(decode, "batch")] == [1, 3]
    assert [row["recording"] for row in of(decode, "recording")] == [False, True]
    assert [row["format"] for row in of(decode, "format")] == ["stored", "bfloat16"]
    assert [row["tokens"] for row in of(document["prefill"], "prefill")] == [5]
    assert document["complete"] and document["missing"] == []


def test_rates_lie_within_their_spread_and_were_measured_in_every_round(document):
    for row in (*document["decode"], *document["prefill"]):
        assert 0 < row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert row["rounds"] == 2 and row["limit_share"] > 0 and row["limit_tokens_per_s"] > 0
    for axis in ("context", "batch", "recording", "format", "prefill"):
        rows = of(document["prefill" if axis == "prefill" else "decode"], axis)
        assert rows[0]["ratio"] == 1.0


def test_bytes_are_those_of_the_formula(document):
    long = of(document["decode"], "context")[1]
    position = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert long["cache_bytes"] == int((100 + 1 + 3 / 2) * position)
    ours = next(row for row in document["engines"] if row["format"] == "stored")
    assert (
        long["step_bytes"] - long["cache_bytes"] == ours["weights_bytes"] - 260 * 32 * 4
    )  # all but the embedding


def test_recording_and_loading_change_no_token(document):
    assert [row["same_tokens"] for row in of(document["decode"], "recording")] == [3, 3]


def test_the_cache_is_counted_as_in_the_command_kv(document):
    counted = [(run["length"], run["token_forwards"]) for run in document["cached"]]
    uncached = [run["token_forwards"] for run in document["uncached"]]
    assert counted == [(32, 32 + 7), (64, 64 + 7)]
    assert uncached == [8 * 32 + 28, 8 * 64 + 28]


def test_the_machine_and_every_process_tell_what_they_are(document):
    machine = document["machine"]
    assert machine["threads"] == 1 and machine["read_gain"] is None and not machine["threads_in_vain"]
    assert machine["read_bytes_per_s"] > 0 and machine["gemm_flops"] > 0
    assert {row["dtype"] for row in machine["gemm"]} == {"float32", "bfloat16"}
    for row in document["engines"]:
        assert (
            row["weights_bytes"] < row["ready_rss_bytes"] <= row["loading_peak_rss_bytes"] <= row["peak_rss_bytes"]
        )


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("What the machine gives", "behind 100 random positions", "tokens/s", "pip install", "GGUF")),
        ("zh", ("机器的极限", "前有 100 个随机位置", "token/秒", "pip install", "GGUF")),
    ],
)
def test_tables_and_what_was_left_out_are_drawn_in_both_languages(cli, tiny, language, words):
    if find_spec("openvino_genai") is not None:
        pytest.skip("OpenVINO is installed here; ends where it is not")
    peers = ("--against", "openvino,llamacpp")
    done = cli("bench", "-m", tiny, "--quick", *ONCE, "--only", "context,against", *peers, "--lang", language)
    assert done.code == 0
    for word in words:
        assert word in done.out, done.out
    assert len([line for line in done.out.splitlines() if line.startswith("! ")]) >= 1
    assert bench_view.t(bench_view.AXES["context"]) in done.err  # progress


def test_the_rates_are_written_as_a_picture(cli, tiny, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    picture = tmp_path / "bench.svg"
    done = cli("bench", "-m", tiny, "--quick", *ONCE, "--only", "batch", "--image", picture, "--json")
    assert done.code == 0 and checked(done.out)["complete"]
    words = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "batch of 3" in words and "the machine's limit" in words


def test_transformers_is_timed_on_the_same_numbers_and_ids(cli, tiny):
    done = cli("bench", "-m", tiny, "--quick", *ONCE, "--only", "against", "--against", "transformers", "--json")
    found = checked(done.out)
    assert found["missing"] == []
    assert [(row["engine"], row["format"], row["recording"]) for row in found["decode"]] == [
        ("decodescope", "stored", True),
        ("transformers", "bfloat16", False),
        ("transformers", "float16", False),
    ]
    assert all(row["same_tokens"] is not None for row in found["decode"])
    ours, theirs, _ = found["engines"]
    assert "sdpa" in theirs["build"] and theirs["version"]
    assert 2 * (theirs["weights_bytes"]) <= ours["weights_bytes"]  # float32 here, 16 bits there
    assert len(found["prefill"]) == 3


def test_llamacpp_is_timed_on_the_same_file_and_ids(cli, small_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp cannot be imported; ends where there is a wheel for it")
    done = cli("bench", "-m", small_path, "--quick", *ONCE, "--only", "against", "--against", "llamacpp", "--json")
    found = checked(done.out)
    ours, theirs = found["engines"]
    assert theirs["engine"] == "llamacpp" and "CPU" in theirs["build"]
    row = next(row for row in found["decode"] if row["engine"] == "llamacpp")
    assert row["same_tokens"] >= 1 and row["new_tokens"] == 3 and row["limit_share"] > 0
    assert abs(ours["weights_bytes"] - theirs["weights_bytes"]) < 0.01 * theirs["weights_bytes"]  # the same blocks


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--quick", "--full"), "--quick"),
        (("--context", "8,many"), "8,many"),
        (("--batch", "0"), "--batch"),
        (("--prefill", "-1"), "--prefill"),
        (("--rounds", "0"), "--rounds"),
        (("-n", "0"), "--max-new-tokens"),
        (("--only", "speed"), "speed"),
        (("--formats", "int3"), "int3"),
        (("--against", "vllm"), "vllm"),
        (("--engine", "vllm"), "native"),
        (("--image", "bars.gif"), "bars.gif"),
        (("--dtype", "int3"), "float32"),
        (("--threads", "0"), "threads"),
        (("-m", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    done = cli("bench", *(() if "-m" in arguments else ("-m", tiny)), *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_read_end_the_bench_with_their_own_sentence(cli, tiny, tmp_path):
    for file in Path(tiny).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-4096:] = b"\xff" * 4096  # NaN
    (tmp_path / "model.safetensors").write_bytes(content)
    done = cli("bench", "-m", tmp_path, "--quick", *ONCE, "--only", "prefill")
    assert done.code == 2 and "NaN" in done.fault and "model" in done.fault


def test_ctrl_c_leaves_what_was_measured_and_no_process(tiny):
    arguments = ["bench", "-m", tiny, "--only", "prefill,batch", "--rounds", "1000000", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "decodescope", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job hands down an ignored SIGINT, which Python would respect.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    with process:
        while "Prefill" not in (said := process.stderr.readline()):
            assert said, "ended early"
        while not (workers := psutil.Process(process.pid).children()):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert out.startswith("Bench of") and "GB/s" in out and "Stopped early" in out
    assert [line for line in err.splitlines() if line.startswith("decodescope: error: Interrupted")]
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_every_axis_has_a_name():
    assert set(bench_view.AXES) == {"machine", *AXES}
