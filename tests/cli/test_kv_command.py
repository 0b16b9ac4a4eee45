"""`kv`: the table, the curve, JSON, the picture, both languages, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "kv.json"
PLAIN = ("--raw", "-n", "3")


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


def test_json_holds_table_and_experiment_and_fits_the_schema(cli, tiny):
    found = checked(cli("kv", "Hello", "-m", tiny, *PLAIN, "--lengths", "8,2,2", "--json").out)
    assert found["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert [layer["shape"] for layer in found["layers"]] == [[1, 2, 7, 8]] * 2
    assert all(layer["used_bytes"] == layer["formula_bytes"] for layer in found["layers"])
    assert [(run["length"], run["token_forwards"]) for run in found["cached"]] == [(2, 4), (8, 10)]
    assert [(run["length"], run["token_forwards"]) for run in found["uncached"]] == [(2, 9), (8, 27)]
    assert [step["cached_tokens"] for step in found["steps"]] == [5, 6, 7]
    assert found["gqa"]["ratio"] == 2.0 and found["complete"]


@pytest.mark.parametrize("left_out", [("--no-experiment",), ("--lengths", "")])
def test_the_experiment_can_be_left_out(cli, tiny, left_out):
    found = checked(cli("kv", "Hi", "-m", tiny, *PLAIN, *left_out, "--json").out)
    assert found["cached"] == found["uncached"] == found["compared"] == []
    assert found["complete"] and len(found["steps"]) == 3
    assert "experiment" not in cli("kv", "Hi", "-m", tiny, *PLAIN, *left_out).out


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (
            "en",
            ("KV cache of", "by formula", "query heads share", "uncached", "same tokens ✓", "128k*", "Estimated"),
        ),
        ("zh", ("的 KV 缓存", "按公式", "个查询头共用", "无缓存", "token 相同 ✓", "128k*", "估算")),
    ],
)
def test_the_table_and_the_bars_are_drawn_in_both_languages(cli, tiny, language, words):
    out = cli("kv", "Hi", "-m", tiny, *PLAIN, "--lengths", "4", "--lang", language).out
    for word in words:
        assert word in out
    assert "[1, 2, 4, 8]" in out and "✗" not in out
    longest = [line for line in out.splitlines() if "█" * 24 in line]
    assert len(longest) == 1  # the slower way fills its bar


def test_the_dtype_in_use_is_the_weights(cli, tiny):
    found = checked(cli("kv", "Hi", "-m", tiny, *PLAIN, "--no-experiment", "--dtype", "bfloat16", "--json").out)
    assert [row["dtype"] for row in found["cache_dtypes"] if row["in_use"]] == ["bfloat16"]
    assert {layer["dtype"] for layer in found["layers"]} == {"bfloat16"}
    assert found["bytes_per_token"] == 2 * 2 * 2 * 8 * 2


def test_an_answer_that_ends_early_is_told_as_it_is(cli, tiny):
    found = checked(cli("kv", "x" * 510, "-m", tiny, "--raw", "-n", "8", "--no-experiment", "--json").out)
    assert (len(found["steps"]), found["finish_reason"]) == (2, "length")
    assert found["notes"] == ["note.context_limit"]
    assert found["fit"]["tokens_left"] == 1


def test_the_curve_is_written_as_a_picture(cli, tiny, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    picture = tmp_path / "curve.svg"
    done = cli("kv", "Hi", "-m", tiny, *PLAIN, "--lengths", "2,4", "--image", picture, "--lang", "zh", "--json")
    assert done.code == 0 and checked(done.out)["complete"]
    words = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "无缓存" in words and "提示词 token 数" in words
    assert "curve.svg" in done.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--lengths", "4,many"), "4,many"),
        (("--lengths", "4,,5"), "4,,5"),
        (("--lengths", "0"), "--lengths"),
        (("--lengths", "-4"), "--lengths"),
        (("--lengths", "9" * 5000), "--lengths"),
        (("--lengths", "511"), "context of 512"),
        (("--lengths", "99999999999999"), "context of 512"),
        (("--repeats", "0"), "--repeats"),
        (("-n", "0"), "--max-new-tokens"),
        (("--engine", "vllm"), "native"),
        (("--image", "curve.gif"), "curve.gif"),
        (("--image", "curve.svg", "--no-experiment"), "--image"),
        (("--raw", "--system", "x"), "--system"),
        (("--dtype", "int3"), "float32"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    done = cli("kv", "Hi", "-m", tiny, "-n", "3", *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("prompt", "word"), [("", "empty"), ("x" * 600, "600 tokens")])
def test_a_prompt_that_cannot_be_is_one_sentence(cli, tiny, prompt, word):
    done = cli("kv", prompt, "-m", tiny, "--raw")
    assert word in done.fault and done.code == 2 and done.out == ""


def test_tokens_cannot_command_the_terminal(cli, tiny):
    out = cli("kv", "\x1b[31m\u202e", "-m", tiny, "--raw", "-n", "40", "--no-experiment").out
    assert not {c for c in out if (ord(c) < 32 and c != "\n") or c == "\u202e"}


def test_an_interrupted_experiment_leaves_what_it_had_measured(tiny):
    arguments = ["kv", "Hi", "-m", tiny, "-n", "40", "--lengths", "1,400", "--repeats", "100000"]
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
        head = process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        rest, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert head.startswith("KV cache of") and "by formula" in rest and "Stopped early" in rest
    assert err.startswith("decodescope: error: Interrupted") and len(err.splitlines()) == 1
