"""`decodescope fork` and the tree: branches are kept in the run's folder, drawn, and leave the run as it was."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from decodescope import read_trace
from decodescope.model.cache_formats import Stored
from decodescope.model.kv_cache import KVCache
from decodescope.trace.store import TraceWriter
from tiny_model import make_tiny_model

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "fork.json"


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """A saved run, to be copied."""
    from decodescope.cli.main import main

    folder = tmp_path_factory.mktemp("saved") / "run"
    assert main(["run", "Hi there", "-m", tiny, "--raw", "-n", "8", "--ignore-eos", "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


def test_the_documents_of_forks_fit_the_schema_and_are_kept_with_the_run(cli, run):
    before = read_trace(run)
    found = checked(cli("fork", run, "--at", "3", "--branches", "3", "--depth", "4", "--verify", "--json").out)
    assert [branch["number"] for branch in found["branches"]] == [1, 2, 3]
    assert [len(branch["tokens"]) for branch in found["branches"]] == [4, 4, 4]
    assert all(branch["verification"]["agrees"] for branch in found["branches"])
    assert found["shared_bytes"] == found["past_tokens"] * before.run.kv_bytes_per_token
    saved = read_trace(run)
    assert saved.path() == before.path() and saved.end == before.end and len(saved.branches) == 3
    for branch in found["branches"]:
        kept = saved.branch(branch["number"]).token_ids[3:]
        assert kept == [token["token_id"] for token in branch["tokens"]]


def test_a_view_shows_tree_figures_and_check(cli, run):
    done = cli("fork", run, "--at", "2", "--token", "A", "--token", "66", "--token", '"7"', "-n", "4", "--verify")
    assert done.code == 0 and "Fork at step 2" in done.out and done.err.count("error") == 0
    assert "✎A" in done.out and "✎B" not in done.out and "(66)" in done.out and "7 (" in done.out
    assert done.out.count("✓ a fresh prefill") == 3 and "held once" in done.out
    assert [line for line in done.out.splitlines() if "▶ 2–7" in line and "the run: length limit" in line]
    for number in (1, 2, 3):
        assert f"branch {number}: length limit" in done.out
    chinese = cli("fork", run, "--at", "2", "--token", "C", "-n", "1", "--lang", "zh").out
    assert "在第 2 步分叉" in chinese and "分支 4" in chinese and "原运行" in chinese


def test_digits_are_an_id_and_quotes_hold_a_text(cli, run):
    given = ("--token", "65", "--token", '"5"', "--token", r'"\n"', "--token", "'", "--token", '"')
    found = checked(cli("fork", run, "--at", "1", *given, "-n", "1", "--json").out)
    firsts = [branch["tokens"][0] for branch in found["branches"]]
    assert firsts[0]["token_id"] == 65 and [first["text"] for first in firsts[1:]] == ["5", "\n", "'", '"']


def test_without_a_token_the_sampler_chooses_and_other_settings_are_told(cli, run):
    same = checked(cli("fork", run, "--at", "3", "--json").out)
    assert same["branches"][0]["parts_at"] is None and len(same["branches"][0]["tokens"]) == 5
    other = checked(cli("fork", run, "--at", "3", "--temperature", "1.5", "--seed", "3", "-n", "5", "--json").out)
    assert {each["name"]: each["value"] for each in other["settings"]} == {"temperature": 1.5, "seed": 3}
    assert "temperature=1.5 · seed=3" in cli("fork", run, "--at", "3", "--temperature", "1.5", "--seed", "3").out
    assert read_trace(run).branches[1].settings == read_trace(run).branches[2].settings
    guarded = cli("fork", run, "--at", "3", "--guard", "loop=warn", "--json")
    assert {each["name"]: each["value"] for each in checked(guarded.out)["settings"]} == {"guards": "loop=warn"}


def test_a_branch_is_forked_and_shown_like_a_run(cli, run):
    cli("fork", run, "--at", "2", "--token", "A", "--temperature", "0.5", "--seed", "1", "-n", "6")
    nested = checked(cli("fork", run, "--branch", "1", "--at", "4", "--token", "B", "-n", "2", "--json").out)
    saved = read_trace(run)
    assert saved.branch(2).token_ids[:4] == saved.branch(1).token_ids[:4]
    assert nested["branches"][0]["parts_at"] == 4
    shown = cli("show", run, "--branch", "2")
    assert "temperature 0.5" in shown.out and "forked from this run: 2" in shown.out
    assert (
        cli("show", run, "--branch", "2", "--step", "4")
        .out.splitlines()[0]
        .startswith("step 4  B [picked by hand]")
    )
    lines = [json.loads(line) for line in cli("show", run, "--branch", "2", "--json").out.splitlines()]
    assert [line["type"] for line in lines] == ["run", *["step"] * 6, "end"]
    assert lines[-1]["node"] == lines[-2]["node"] and lines[4 + 1]["text"] == "B"
    plain = [json.loads(line) for line in cli("show", run, "--json").out.splitlines()]
    assert [line["type"] for line in plain] == ["run", *["step"] * 8, "end"]
    assert "forked from this run: 2" in cli("show", run).out
    for number in ("0", "3", "-1"):
        done = cli("show", run, "--branch", number)
        assert done.code == 2 and f"no branch {number}" in done.fault


def test_the_tree_of_a_stepped_run_shows_what_was_left(program, tiny, tmp_path):
    done = program(
        "run", "Hi", "-m", tiny, "--step", "--ignore-eos", "--save", tmp_path / "run", stdin=b"2\n\n3\nq\n"
    )
    assert done.code == 0
    rows = program("show", tmp_path / "run", "--all").out.splitlines()[3:]
    assert [row.split()[:2] for row in rows] == [["├", "0"], ["▶", "0"], ["├", "1"], ["▶", "1"]]
    assert [("left" in row, "✎" in row) for row in rows] == [(True, False), (False, True)] * 2
    assert "the run: interrupted" in rows[-1]


def test_a_planted_fault_is_found_and_is_the_exit_code(cli, run, monkeypatch):
    whole = KVCache.fork

    def spoilt(cache: KVCache) -> KVCache:
        child = whole(cache)
        child._stems = [
            [(Stored(keys.numbers * 1.05), values) for keys, values in pairs] for pairs in child._stems
        ]
        return child

    monkeypatch.setattr(KVCache, "fork", spoilt)
    done = cli("fork", run, "--at", "3", "--branches", "2", "--verify")
    assert done.code == 1 and "fresh prefill" in done.fault and done.out.count("✗") == 2
    document = cli("fork", run, "--at", "3", "--branches", "2", "--verify", "--json")
    assert document.code == 1 and not checked(document.out)["branches"][0]["verification"]["agrees"]


def test_tokens_of_forks_cannot_command_the_terminal(cli, run):
    given = ("--token", r'"\u001b"', "--token", "[red]"[0], "-n", "20", "--temperature", "5", "--seed", "1")
    assert not {
        c for c in cli("fork", run, "--at", "1", *given).out if (ord(c) < 32 and c != "\n") or c == "\u202e"
    }
    assert "\x1b" not in cli("show", run, "--all").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "9"), "no step 9 to fork at: give one from 0 to 8"),
        (("--at", "-1"), "no step -1"),
        (("--token", "ab"), "2 tokens here: 'a'"),
        (("--token", ""), "empty"),
        (("--token", '"\\x"'), "JSON"),
        (("--token", "260"), "0 to 259"),
        (("--token", "9" * 5000), "5000 tokens here"),
        (("--depth", "3"), "--branches"),
        (("--branches", "0"), "from 1 to 50"),
        (("--branches", "51"), "from 1 to 50"),
        (("--branches", "-3"), "from 1 to 50"),
        (("--branches", "2", "--token", "a"), "one of the two"),
        (("--branches", "2", "--depth", "0"), "--depth is the number"),
        (("--at", "8", "--branches", "2"), "right behind"),
        (("-n", "0"), "max-new-tokens"),
        (("--branch", "1"), "no branch 1"),
        (("--temperature", "-1"), "Temperature"),
        (("--sampler", "best"), "best"),
        (("--guard", "nonsense"), "nonsense"),
        (("--engine", "vllm"), "native"),
        (("--dtype", "int3"), "float32"),
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--at", "x"), "--at"),
    ],
)
def test_bad_input_is_one_sentence_and_adds_nothing(cli, run, arguments, words):
    before = (run / "trace.db").read_bytes()
    done = cli("fork", run, *(() if "--at" in arguments else ("--at", "1")), *arguments)
    assert words in done.fault and done.code == 2 and done.out == ""
    assert (run / "trace.db").read_bytes() == before and [path.name for path in run.iterdir()] == ["trace.db"]


def alter(folder: Path, script: str) -> None:
    with sqlite3.connect(folder / "trace.db") as connection:
        connection.executescript(script)
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: alter(run, "PRAGMA user_version = 99"), "newer decodescope"),
        (lambda run: (run / "trace.db").write_bytes(b"no database at all"), "does not hold a decodescope run"),
        (lambda run: alter(run, "UPDATE node SET parent_id = 77 WHERE id = 3"), "damaged"),
        (lambda run: (run / "trace.db").unlink(), "no saved run"),
        (lambda run: shutil.rmtree(run), "no folder"),
        (lambda run: alter(run, "UPDATE run SET path = '/no/model', model = 'some/thing'"), "-m"),
        (lambda run: alter(run, "UPDATE setting SET value = 'hot', value_type = 'str' WHERE name = 'temperature'"), "temperature"),
        (lambda run: alter(run, "UPDATE run SET dtype = 'int3'"), "int3"),
    ],
    ids=["newer", "foreign", "damaged", "empty", "missing", "no-model", "setting", "dtype"],
)  # fmt: skip
def test_what_is_no_sound_run_is_refused_in_one_sentence(cli, run, spoil, words):
    spoil(run)
    done = cli("fork", run, "--at", "1")
    assert words in done.fault and done.code == 2 and done.out == ""


def test_the_run_of_another_model_and_one_still_being_written_are_refused(cli, run, tmp_path):
    other = make_tiny_model(tmp_path / "other", hidden_size=16)
    assert "other weights" in cli("fork", run, "--at", "1", "-m", other).fault
    with TraceWriter.reopen(run):
        done = cli("fork", run, "--at", "1", "-m", "/no/such/model")  # said before any model is looked for
        assert done.code == 2 and "still being written" in done.fault
    assert cli("fork", run, "--at", "1").code == 0


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_fork_that_is_stopped_leaves_the_run_whole(cli, tiny, run, end):
    before = read_trace(run)
    arguments = ["fork", str(run), "--at", "3", "--branches", "3", "-n", "450"]
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
        while len(read_trace(run).steps) < 30:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        os.kill(process.pid, end)
        out, err = process.stdout.read(), process.stderr.read()
    after = read_trace(run)
    assert after.path() == before.path() and after.end == before.end
    reasons = {branch.end.finish_reason for branch in after.branches}
    if end == signal.SIGINT:
        assert process.returncode == 130 and err.startswith("decodescope: error: Interrupted")
        assert len(after.branches) == 3 and out.count("interrupted") >= 3
    assert reasons == {"interrupted"}
    known = len(after.branches)
    assert cli("fork", run, "--at", "3", "--token", "z", "-n", "1").code == 0
    assert len(read_trace(run).branches) == known + 1 and read_trace(run).path() == before.path()
