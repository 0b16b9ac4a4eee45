"""`run --chat-loop`: what is read, what is shown after each turn, and how it ends."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from decodescope import read_trace

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "turn.json"
LOOP = ("--chat-loop", "-n", "5", "--ignore-eos")


@pytest.fixture
def talk(cli, tiny, monkeypatch) -> Callable[..., str]:
    def run(said: str, *options: str | Path) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        done = cli("run", *options, "-m", tiny, *LOOP)
        assert done.code == 0, done.err
        return done.out

    return run


def test_each_line_is_a_turn_and_empty_lines_are_none(talk):
    out = talk("one\n\n   \ntwo\n")
    assert re.findall(r"^    turn (\d+): ", out, re.MULTILINE) == ["0", "1"]
    assert "2 turn(s)" in out and "you > one" in out


def test_the_prompt_on_the_command_line_is_the_first_turn(talk):
    turns = [json.loads(line) for line in talk("two\n", "one", "--json").splitlines()]
    assert [turn["user"] for turn in turns] == ["one", "two"]


def test_quit_ends_and_undo_takes_the_last_turn_back(talk):
    out = talk("/undo\none\ntwo\n/undo\nthree\n/quit\nfour\n")
    assert "there is no turn to take back" in out and "turn 1 is taken back" in out
    assert re.findall(r"^    turn (\d+): ", out, re.MULTILINE) == ["0", "1", "2"]
    assert re.findall(r"^ +(\d) +\d+ +\d+ +\d+ ", out, re.MULTILINE) == ["0", "2"]  # those of the table
    again = talk("one\n/undo\ntwo\n")
    assert again.count("sampling:") == 1  # the model is told of once


def test_what_a_turn_cost_is_told_and_summed_up_in_what_was_measured(talk):
    said = "one\ntwo\nthree\n"
    first, *_, last = turns = [json.loads(line) for line in talk(said, "--json").splitlines()]
    out = talk(said)
    for turn in turns:
        read = f"{turn['reused_tokens']} reused, {turn['read_tokens']} read in "
        assert f"prompt {turn['prompt_tokens']} tokens: {read}" in out
        assert re.search(
            rf"^ +{turn['turn']} +{turn['prompt_tokens']} +{turn['reused_tokens']} ", out, re.MULTILINE
        )
    why = " ".join(out[out.index("Each turn carries") :].split())
    assert f"grew from {first['prompt_tokens']} to {last['prompt_tokens']} tokens" in why
    prompts, reused = (sum(turn[key] for turn in turns) for key in ("prompt_tokens", "reused_tokens"))
    assert f"{reused} of {prompts} prompt tokens" in why


def test_a_turn_in_json_is_a_line_that_fits_the_schema(talk):
    lines = talk("one\n春天\n", "--json").splitlines()
    assert len(lines) == 2
    for line in lines:
        jsonschema.validate(json.loads(line), json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)


def test_every_turn_is_saved_as_a_run(talk, tmp_path):
    turns = [json.loads(line) for line in talk("one\ntwo\n", "--json", "--save", tmp_path / "talk").splitlines()]
    assert [read_trace(tmp_path / "talk" / f"{place:04d}").text for place in range(2)] == [
        t["text"] for t in turns
    ]


def test_without_the_cache_every_prompt_is_read_whole_and_that_is_said(talk):
    out = talk("one\ntwo\n", "--no-cache")
    assert out.count(": 0 reused") == 2 and "every token reads all of the conversation again" in out
    assert "0 B" not in out.rpartition("Each turn")[2]


def test_guards_are_shown_in_a_conversation_too(talk):
    out = talk("one\n", "--guard", "entropy=5.56:stop,window=3")
    assert "guard entropy: measured " in out and "turn 0: stopped by guard entropy" in out


@pytest.mark.parametrize(
    "more", [["--step"], ["--break", "loop"], ["--stages"], ["--raw"], ["--prompts", "x"], ["--messages", "x"]]
)
def test_what_a_conversation_cannot_be_is_one_sentence(cli, tiny, more):
    done = cli("run", "-m", tiny, "--chat-loop", *more)
    assert done.code == 2 and done.fault.startswith("--chat-loop keeps one conversation")


def test_a_model_without_a_template_and_a_full_context_are_one_sentence(cli, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 600 + "\n"))
    assert "512" in cli("run", "-m", tiny, "--chat-loop").fault


def test_a_line_that_is_too_long_leaves_the_conversation_as_it_was(cli, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n" + "x" * 600 + "\nagain\n"))
    done = cli("run", "-m", tiny, *LOOP)
    assert done.code == 0 and "512" in done.out and "2 turn(s)" in done.out


def test_the_answer_comes_in_a_real_terminal(tiny):
    theirs, ours = pty.openpty()
    command = [sys.executable, "-m", "decodescope", "run", "-m", tiny, *LOOP]
    with subprocess.Popen(
        command, stdin=ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.write(theirs, b"hello\n/quit\n")
        out, err = process.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, err) == (0, "")
    assert "turn 0: length limit" in out and "1 turn(s)" in out
