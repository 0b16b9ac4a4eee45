"""`run`, `show`, `export`: what they print, and that live and replayed views agree."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from decodescope import read_trace

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_is_run_steps_end_and_fits_the_schemas(cli, tiny):
    found = lines_of(cli("run", "Hi", "-m", tiny, "-n", "3", "--json").out)
    assert [line["type"] for line in found] == ["run", "step", "step", "step", "end"]
    for line in found:
        schema = json.loads((SCHEMAS / f"{line['type']}-line.json").read_text())
        jsonschema.validate(line, schema, jsonschema.Draft202012Validator)


def test_candidates_are_sorted_by_raw_logit_and_positions_are_the_tokens_own(cli, tiny):
    run, *steps, end = lines_of(cli("run", "Hi", "-m", tiny, "-n", "4", "--json", "--ignore-eos").out)
    prompt = len(run["prompt_tokens"])
    assert [s["position"] for s in steps] == [prompt + i for i in range(4)]
    assert [s["parent"] for s in steps] == [None, 0, 1, 2]
    for step in steps:
        logits = [c["logit"] for c in step["candidates"]]
        assert logits == sorted(logits, reverse=True)
        assert len(logits) == 50
        assert step["kv"]["tokens"] == step["position"]
    assert (end["prompt_tokens"], end["new_tokens"]) == (prompt, 4)


def test_a_saved_run_is_shown_as_it_was_seen(cli, tiny, tmp_path):
    seen = cli(
        "run", "春天", "-m", tiny, "-n", "5", "--save", tmp_path / "run", "--temperature", "1", "--seed", "4"
    )
    shown = cli("show", tmp_path / "run")
    assert shown.out == seen.out
    assert shown.code == seen.code == 0


def test_saved_json_is_the_json_that_was_printed(cli, tiny, tmp_path):
    printed = cli("run", "Hi", "-m", tiny, "-n", "4", "--save", tmp_path / "run", "--json").out
    assert cli("show", tmp_path / "run", "--json").out == printed
    assert cli("export", tmp_path / "run").out == printed
    cli("export", tmp_path / "run", "--to", "jsonl", "-o", tmp_path / "run.jsonl")
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8") == printed


def test_one_step_can_be_shown(cli, tiny, tmp_path):
    cli("run", "Hi", "-m", tiny, "-n", "4", "--save", tmp_path / "run", "--ignore-eos")
    one = cli("show", tmp_path / "run", "--step", "2").out
    assert one.startswith("step 2 ")
    assert "no step 4" in cli("show", tmp_path / "run", "--step", "4").fault


def test_the_block_of_a_step_tells_token_probability_entropy_cache_and_time(cli, tiny):
    out = cli("run", "Hi", "-m", tiny, "-n", "1", "--ignore-eos", "--candidates", "3").out
    headline = next(line for line in out.splitlines() if line.startswith("step 0 "))
    assert re.search(r"p [\d.<>]+ % · rank 1 · entropy [\d.]+ nats", headline)
    assert re.search(r"\n    KV \d+ tokens, .+ · forward [\d.]+ ms, step [\d.]+ ms\n", out)
    bars = [line for line in out.splitlines() if re.match(r"^   [▶ ] +\d+ ", line)]
    assert len(bars) == 3 and bars[0].startswith("   ▶  1 ")


def test_chinese_is_spoken_where_asked_or_where_the_locale_says(program, tiny):
    asked = program("run", "Hi", "-m", tiny, "-n", "1", "--lang", "zh")
    by_locale = program("run", "Hi", "-m", tiny, "-n", "1", LC_ALL="zh_CN.UTF-8")
    english = program("run", "Hi", "-m", tiny, "-n", "1", LC_ALL="C.UTF-8")
    assert "小结" in asked.out and "小结" in by_locale.out and "summary" in english.out
    assert "看着语言模型" in program("--help", "--lang", "zh").out or program("--help", LC_ALL="zh_CN.UTF-8").out


def test_a_batch_prints_each_row_and_marks_its_json(cli, tiny, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\n\n你好\n", encoding="utf-8")
    plain = cli("run", "-m", tiny, "--prompts", tmp_path / "prompts.txt", "-n", "2")
    assert "row 0" in plain.out and "row 1" in plain.out
    found = lines_of(cli("run", "-m", tiny, "--prompts", tmp_path / "prompts.txt", "-n", "2", "--json").out)
    assert {line["row"] for line in found} == {0, 1}
    for row, text in enumerate(["Hi", "你好"]):
        mine = [{k: v for k, v in line.items() if k != "row"} for line in found if line["row"] == row]
        alone = lines_of(cli("run", text, "-m", tiny, "-n", "2", "--json").out)
        assert [s["token_id"] for s in mine if s["type"] == "step"] == [
            s["token_id"] for s in alone if s["type"] == "step"
        ]
    for line in found:
        jsonschema.validate(line, json.loads((SCHEMAS / f"{line['type']}-line.json").read_text()))


def test_messages_and_system_reach_the_prompt(cli, tiny, tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    run = lines_of(
        cli("run", "-m", tiny, "--messages", tmp_path / "m.json", "--system", "s", "-n", "1", "--json").out
    )[0]
    assert run["prompt_text"].startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>")
    assert [t["role"] for t in run["prompt_tokens"] if t["role"] != "template"] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_the_prompt_can_come_from_standard_input(program, tiny):
    piped = program("run", "-", "-m", tiny, "--raw", "-n", "1", "--json", stdin="你好\n".encode())
    assert lines_of(piped.out)[0]["prompt_text"] == "你好"


def test_control_and_bidi_characters_never_reach_the_terminal(cli, tiny):
    out = cli("run", "a\x1b[31mb\u202ec[red]", "-m", tiny, "-n", "3", "--raw").out
    assert "\x1b" not in out and "\u202e" not in out
    assert "␛" in out
    assert "[│r│e│d│]" in out  # never obeyed as markup
    assert "a␛[31mb⟨U+202E⟩c[red]" in cli("tokens", "a\x1b[31mb\u202ec[red]", "-m", tiny).out


STEPPING = b"2\nb\n\n\nq\n"


def test_stepping_picks_goes_back_and_quits(program, tiny, tmp_path):
    done = program("run", "Hi", "-m", tiny, "--step", "--ignore-eos", "--save", tmp_path / "run", stdin=STEPPING)
    assert done.code == 0
    trace = read_trace(tmp_path / "run")
    assert trace.end.finish_reason == "interrupted"
    path = trace.path()
    assert path[0].forced and path[0].rank == 2
    assert "picked by hand" in done.out
    tree = program("show", tmp_path / "run", "--all").out
    assert len(trace.steps) == 4
    left, kept = tree.splitlines()[-2:]
    assert left.split()[:2] == ["├", "0"] and "left" in left
    assert kept.split()[:2] == ["▶", "0–2"] and "✎" in kept


def test_stepping_says_what_it_understands(program, tiny):
    done = program("run", "Hi", "-m", tiny, "--step", "-n", "2", stdin=b"nonsense\n99\nq\n")
    assert done.out.count("type Enter") == 2


def wait_for_steps(process: subprocess.Popen, count: int) -> list[str]:
    return [process.stdout.readline() for _ in range(count + 1)]  # the run line comes first


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_loses_no_printed_step(tiny, tmp_path, end):
    command = [sys.executable, "-m", "decodescope", "run", "Hi", "-m", tiny, "-n", "450", "--ignore-eos", "--json"]
    process = subprocess.Popen(
        [*command, "--save", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job hands down an ignored SIGINT, which Python would respect.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        printed = wait_for_steps(process, 7)
        os.kill(process.pid, end)
        printed += process.stdout.readlines()  # communicate() would skip what readline() has read ahead
        err = process.stderr.read()
    complete = [json.loads(line) for line in printed if line.endswith("\n")]
    steps = [line for line in complete if line["type"] == "step"]
    trace = read_trace(tmp_path / "run")
    assert trace.token_ids[: len(steps)] == [s["token_id"] for s in steps]
    assert 7 <= len(steps) < 450
    assert trace.end.finish_reason == "interrupted"
    if end == signal.SIGINT:
        assert process.returncode == 130
        assert err.startswith("decodescope: error: Interrupted") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["run Hi -n 200 --ignore-eos --json", "forward Hi", "forward Hi --steps 60 --json"]
)
def test_a_reader_that_goes_away_is_no_fault(tiny, command):
    pipeline = f"set -o pipefail; {sys.executable} -m decodescope {command} -m {tiny} | head -c 5"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_batch_tells_the_model_once_and_settings_and_ids_of_each_row(cli, tiny, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\nyou\n")
    out = cli(
        "run", "-m", tiny, "--prompts", tmp_path / "prompts.txt", "-n", "1", "--temperature", "0", "--seed", "3"
    ).out
    assert out.count("sha256") == 1
    assert out.count("! temperature 0 means greedy") == 2 and out.count("\nids [") == 2


def test_a_batch_of_one_lies_in_a_numbered_folder_too(cli, tiny, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\n")
    cli("run", "-m", tiny, "--prompts", tmp_path / "prompts.txt", "-n", "1", "--save", tmp_path / "runs")
    assert len(read_trace(tmp_path / "runs" / "0000").steps) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_utf_8_whatever_the_streams_encoding(program, tiny, encoding):
    done = program("tokens", "é😀", "-m", tiny, "--json", PYTHONIOENCODING=encoding)
    assert json.loads(done.out)["text"] == "é😀"


@pytest.mark.parametrize("command", ["run Hi -n 1", "run Hi -n 1 --json", "tokens Hi", "model"])
def test_a_full_device_is_one_sentence(tiny, command):
    line = f"{sys.executable} -m decodescope {command} -m {tiny} > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("decodescope: error: The output could not be written")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("closing", "code"), [(">&-", 0), ("<&-", 0), ("--step <&-", 0)])
def test_closed_streams_are_no_fault(tiny, closing, code):
    line = f"{sys.executable} -m decodescope run Hi -n 2 -m {tiny} {closing}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_no_line_of_a_step_is_wider_than_a_terminal(cli, tiny):
    out = cli("run", "Hi", "-m", tiny, "-n", "2", "--ignore-eos", "--temperature", "1", "--seed", "1").out
    steps = out[out.index("step 0") : out.index("answer")]
    assert max(map(len, steps.splitlines())) <= 80


def test_kept_logits_stay_within_their_budget_and_the_summary_says_of_how_many_steps_they_are(cli, tiny, tmp_path):
    asked = ("run", "Hi", "-m", tiny, "-n", "5", "--ignore-eos", "--keep", "logits", "--keep-budget")
    seen = cli(*asked, "3000", "--save", tmp_path / "run")  # a step has 260 logits of 4 bytes
    assert "raw logits kept           of 2 of 5 steps" in seen.out
    assert cli("show", tmp_path / "run").out == seen.out
    assert "raw logits kept" not in cli(*asked, "1MiB", "--save", tmp_path / "all").out
    none = cli(*asked, "0", "--save", tmp_path / "none")
    assert none.code == 0 and "no logits were kept" in none.err
    assert "--keep-budget must be" in cli(*asked, "many", "--save", tmp_path / "bad").fault
