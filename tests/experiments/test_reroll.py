"""Re-rolled from stored logits: a run's own settings give the run; others are exact until they leave it."""

import json
import math
import shutil
from pathlib import Path

import pytest

from decodescope import Session
from decodescope.errors import InputError
from decodescope.experiments.reroll import reroll
from decodescope.experiments.sample_grid import Cell, Grid, parse_grid
from decodescope.options import RunOptions
from decodescope.trace.records import Trace
from tiny_model import make_tiny_model

OWN = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.1}
TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("reroll") / "tiny")


@pytest.fixture(scope="module")
def session(model) -> Session:
    return Session.open(str(model))


def saved(session: Session, folder: Path, sampling: dict, **options) -> Trace:
    given = {"keep_logits": True, "ignore_eos": True, "max_new_tokens": TOKENS, **options}
    return session.run(session.prompt("Hello", chat=False), options=RunOptions(sampling, save=folder, **given))


@pytest.fixture(scope="module")
def run(session, tmp_path_factory) -> Trace:
    return saved(session, tmp_path_factory.mktemp("runs") / "run", {**OWN, "seed": 11})


def cell(**given) -> Cell:
    return Cell("a setting", given)


@pytest.mark.parametrize("sampling", [{**OWN, "seed": 11}, {**OWN, "seed": 12}, {}, {"repetition_penalty": 1.3}])
def test_the_runs_own_settings_give_the_whole_run(session, tmp_path, sampling):
    run = saved(session, tmp_path / "run", sampling)
    settings = {name: value for name, value in sampling.items() if name != "seed"}
    report = reroll(tmp_path / "run", Grid((cell(**settings),), (sampling.get("seed", 0),)))
    (row,) = report.rows
    assert list(row.token_ids) == run.token_ids and row.exact_steps == TOKENS == report.kept_steps
    assert (row.text, row.finish_reason, row.parts_at, row.parting) == (run.text, "length", None, None)
    assert row.entropy_nats_mean == pytest.approx(math.fsum(step.entropy_nats for step in run.path()) / TOKENS)


@pytest.mark.parametrize("knob", ["temperature", "top_k", "repetition_penalty"])
def test_other_settings_are_exact_until_they_leave_the_run_and_leave_it_where_a_real_run_does(session, run, knob):
    other = {**OWN, knob: {"temperature": 1.6, "top_k": 4, "repetition_penalty": 3.0}[knob]}
    real = session.run(session.prompt("Hello", chat=False), options=RunOptions({**other, "seed": 11}, ignore_eos=True, max_new_tokens=TOKENS))  # fmt: skip
    (row,) = reroll(Path(run.end.trace), Grid((cell(**other),), (11,))).rows
    at = next(i for i, (a, b) in enumerate(zip(real.token_ids, run.token_ids, strict=True)) if a != b)
    assert row.exact_steps == row.parts_at == at and list(row.token_ids) == run.token_ids[:at]
    assert (row.parting.token_id, row.parting.first_token_id) == (real.token_ids[at], run.token_ids[at])
    assert row.parting.text == session.spell(real.token_ids[at])[0]
    assert row.parting.repaired_by == (knob,) and row.finish_reason is None
    assert row.parting.prob_here == pytest.approx(real.path()[at].prob_final, rel=1e-4)


def test_a_greedy_row_and_one_with_another_seed_leave_a_drawn_run(run):
    grid = Grid((Cell("greedy", {}, "greedy"), cell(**OWN)), (99,))
    greedy, drawn = reroll(Path(run.end.trace), grid).rows
    assert (greedy.seed, greedy.parting.cause) == (None, "highest")
    assert (drawn.seed, drawn.parting.repaired_by) == (99, ("seed",))


def test_steps_without_logits_end_what_is_known(session, tmp_path):
    bytes_of_a_step = 260 * 4
    run = saved(session, tmp_path / "run", {**OWN, "seed": 3}, logits_bytes=5 * bytes_of_a_step)
    report = reroll(tmp_path / "run", Grid((cell(**OWN),), (3,)))
    (row,) = report.rows
    assert report.kept_steps == row.exact_steps == 5 and list(row.token_ids) == run.token_ids[:5]
    assert row.finish_reason is None and row.parting is None


def test_a_run_without_logits_is_refused(session, tmp_path):
    saved(session, tmp_path / "run", {}, keep_logits=False)
    with pytest.raises(InputError, match="--keep logits"):
        reroll(tmp_path / "run", Grid((cell(),)))


def test_a_token_chosen_by_hand_is_where_any_setting_leaves_the_run(session, tmp_path):
    options = RunOptions(max_new_tokens=6, save=tmp_path / "run", keep_logits=True, ignore_eos=True)
    live = session.start([session.prompt("Hello", chat=False)], options)
    live.force([65, 66])
    for _ in live.steps():
        pass
    (row,) = reroll(tmp_path / "run", parse_grid(["preset=greedy"])).rows
    assert (row.exact_steps, row.parting.cause, row.parting.first_token_id) == (0, "by_hand", 65)
    assert row.token_ids == () and row.entropy_nats_mean is None and row.text == ""


def test_names_come_from_the_tokenizer_or_stay_ids_and_no_weights_are_read(session, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    run = saved(Session.open(str(copy)), tmp_path / "run", {"temperature": 0.01, "seed": 1}, candidates=1)
    (copy / "model.safetensors").unlink()
    hot = Grid((cell(temperature=50.0),), (1,))
    (row,) = reroll(tmp_path / "run", hot).rows
    assert row.parting.text == session.spell(row.parting.token_id)[0]
    assert row.parting.token_id not in {each.token_id for step in run.path() for each in step.candidates}
    shutil.rmtree(copy)
    (row,) = reroll(tmp_path / "run", hot).rows
    assert row.parting.text is None and row.parting.first_text is not None
    with pytest.raises(InputError, match="no longer at"):
        reroll(tmp_path / "run", parse_grid(["preset=checkpoint"]))


def test_the_checkpoints_settings_are_read_beside_the_weights(model, run):
    (row,) = reroll(Path(run.end.trace), parse_grid(["preset=checkpoint-greedy"])).rows
    wanted = json.loads((model / "generation_config.json").read_text())["repetition_penalty"]
    assert row.settings["repetition_penalty"] == wanted and row.stages == ("repetition_penalty",)
