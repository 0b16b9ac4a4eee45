"""`--cache-dtype`: what a run holds, what it says of it, and forks that go on in the same format or in another."""

import json
from pathlib import Path

import jsonschema
import pytest

from decodescope import RunOptions, Session, read_trace
from decodescope.cli.main import main
from decodescope.errors import InputError
from decodescope.model.cache_formats import FORMATS
from decodescope.trace.records import Trace
from tiny_model import make_tiny_model

SCHEMA = Path(__file__).resolve().parents[1] / "docs" / "schemas" / "run-line.json"
HEAD_BYTES = {"float32": 64, "bfloat16": 32, "float16": 32, "float8": 20, "int8": 20}  # head size 16
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
OWN = {"float32": None}  # of a run in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("formats") / "model", head_dim=16)


def run(session: Session, **changes) -> Trace:
    return session.run(session.prompt("Once upon", chat=False), max_new_tokens=8, ignore_eos=True, **changes)


@EVERY_FORMAT
def test_a_run_holds_what_was_asked_for_and_says_so(folder, name):
    session = Session.open(str(folder), cache_dtype=name)
    trace = run(session)
    assert (trace.run.dtype, trace.run.cache_dtype) == ("float32", OWN.get(name, name))
    assert trace.run.kv_bytes_per_token == 2 * 2 * 2 * HEAD_BYTES[name]
    for step in trace.steps:
        assert step.kv.used_bytes == trace.run.kv_bytes_per_token * step.kv.tokens
    exact = run(Session.open(str(folder)))
    logits = [[candidate.logit for candidate in each.steps[0].candidates[:1]] for each in (trace, exact)]
    assert logits[0] == pytest.approx(logits[1], abs=0 if name == "float32" else 0.2)


def test_without_a_cache_none_is_told(folder):
    trace = run(Session.open(str(folder), cache_dtype="int8"), use_cache=False)
    assert trace.run.cache_dtype is None and {step.kv.used_bytes for step in trace.steps} == {0}
    assert trace.token_ids == run(Session.open(str(folder)), use_cache=False).token_ids


def test_activations_in_16_bits_may_be_held_in_32_and_the_other_way_round(folder):
    wide = run(Session.open(str(folder), dtype="bfloat16", cache_dtype="float32"))
    assert (wide.run.dtype, wide.run.cache_dtype) == ("bfloat16", "float32")
    same = run(Session.open(str(folder), dtype="bfloat16", cache_dtype="bfloat16"))
    assert same.run.cache_dtype is None
    assert same.token_ids == run(Session.open(str(folder), dtype="bfloat16")).token_ids


@EVERY_FORMAT
def test_forks_in_every_format_are_straight_runs_and_share_their_past(folder, name):
    session = Session.open(str(folder), cache_dtype=name)
    parent = run(session)
    fork = session.fork(parent, 4, 65)
    assert fork.run.cache_dtype == OWN.get(name, name)
    assert "cache_dtype" not in {each.name for each in fork.branches[-1].settings}
    again = Session.open(str(folder), cache_dtype=name).fork(parent, 4, 65)  # reads everything anew
    assert fork.token_ids == again.token_ids
    for one, other in zip(fork.path()[4:], again.path()[4:], strict=True):
        assert one.entropy_nats == pytest.approx(other.entropy_nats, abs=1e-5 if name == "float32" else 0.02)


def test_a_batch_behind_one_past_is_its_rows_alone(folder):
    session = Session.open(str(folder), cache_dtype="int8")
    prompt = session.prompt("Once upon", chat=False)
    options = [
        RunOptions(sampling={"temperature": 1.0, "seed": seed}, max_new_tokens=8, ignore_eos=True)
        for seed in (1, 2, 3)
    ]
    live = session.side_by_side([prompt] * 3, [session.params(each) for each in options], options[0])
    for _ in live.steps():
        pass
    alone = [run(session, temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    assert [each.token_ids for each in live.traces] == [each.token_ids for each in alone]


def test_a_format_that_is_none_is_refused_before_anything_is_read():
    with pytest.raises(InputError, match=r"int4.*float8"):
        Session.open("nowhere/at/all", cache_dtype="int4")


def test_the_command_line_says_it_too(folder, tmp_path, capsys):
    saved = tmp_path / "run"
    common = ["-m", str(folder), "--cache-dtype", "int8", "-n", "4"]
    assert main(["run", "Hi", *common, "--raw", "--ignore-eos", "--save", str(saved)]) == 0
    assert "float32, KV cache int8" in capsys.readouterr().out
    assert main(["show", str(saved), "--json"]) == 0
    header = json.loads(capsys.readouterr().out.splitlines()[0])
    jsonschema.validate(header, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    assert header["cache_dtype"] == "int8" and header["kv_bytes_per_token"] == 2 * 2 * 2 * 20
    for command in ("lens", "attention", "forward"):
        assert main([command, "Hi", "-m", str(folder), "--cache-dtype", "float8", "--steps", "2", "--json"]) == 0
    assert main(["run", "Hi", "-m", str(folder), "--cache-dtype", "int7"]) == 2
    assert "int7" in capsys.readouterr().err


def test_forks_go_on_in_the_runs_format_unless_told_otherwise(folder, tmp_path, capsys):
    saved = tmp_path / "run"
    assert main(["run", "Hi", "-m", str(folder), "--cache-dtype", "int8", "--raw", "-n", "6", "--ignore-eos",
                 "--save", str(saved)]) == 0  # fmt: skip
    assert main(["fork", str(saved), "--at", "2", "--token", "A", "--verify"]) == 0
    assert main(["fork", str(saved), "--at", "2", "--token", "A", "--cache-dtype", "float8", "--verify"]) == 0
    trace = read_trace(saved)
    assert [trace.run.cache_dtype, *(trace.branch(number).run.cache_dtype for number in (1, 2))] == [
        "int8", "int8", "float8",
    ]  # fmt: skip
    told = [{each.name: each.value for each in branch.settings} for branch in trace.branches]
    assert "cache_dtype" not in told[0] and told[1]["cache_dtype"] == "float8"
