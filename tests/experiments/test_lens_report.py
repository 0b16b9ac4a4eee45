"""The lens on whole runs: the run's own choices and numbers, positions, targets, and where a logit comes from."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodescope import Session
from decodescope.errors import FindingError, InputError
from decodescope.experiments import lens
from decodescope.experiments.lens import LensPlan, find_token, study_lens
from decodescope.experiments.lens_records import LensReport
from decodescope.experiments.positions import select_positions
from decodescope.observe.recording import Watch
from families import FAMILIES
from tiny_model import make_tiny_model

TEXT = "The lens!"
EVERY = LensPlan(("all",), steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("lens") / "qwen2")


@pytest.fixture(scope="module")
def session(folder) -> Session:
    return Session.open(str(folder))


def with_tokenizer(family, folder: Path, target: Path) -> str:
    """A tiny model of a family, with the byte tokenizer of another folder."""
    replace(family, settings={**family.settings, "vocab_size": 260}).save(target)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, target)
    return str(target)


def report_of(session: Session, plan: LensPlan, text: str = TEXT) -> LensReport:
    return study_lens(session, session.prompt(text, chat=False), plan)


def test_only_the_last_position_is_looked_at_and_nothing_generated_unless_asked(session):
    (position,) = report_of(session, LensPlan()).positions
    assert (position.position, position.step, position.text, position.chosen) == (len(TEXT) - 1, 0, "!", True)
    assert position.choice == position.next_token
    assert [layer.layer for layer in position.layers] == [0, 1]


def test_generated_tokens_are_those_of_a_run_and_so_are_the_last_layers_numbers(session):
    trace = session.run(session.prompt(TEXT, chat=False), max_new_tokens=4)
    report = report_of(session, LensPlan(steps=4))
    assert [position.choice.token_id for position in report.positions] == trace.token_ids
    assert [position.position for position in report.positions] == [step.position - 1 for step in trace.steps]
    for position, step in zip(report.positions, trace.steps, strict=True):
        last = position.layers[-1]
        assert (position.step, position.chosen, last.choice_rank) == (step.step, True, step.rank)
        assert position.choice_prob == pytest.approx(step.prob, rel=1e-5)
        assert last.choice_logprob_nats == pytest.approx(step.logprob_nats, abs=1e-5)
        assert last.entropy_nats == pytest.approx(step.entropy_nats, abs=1e-5)
        assert [c.token_id for c in last.top] == [c.token_id for c in step.candidates[: len(last.top)]]
        assert last.kl_nats < 1e-9
        assert position.attribution.run_logit == pytest.approx(step.candidates[step.rank - 1].logit, abs=1e-5)


def test_where_the_run_chose_nothing_the_choice_is_the_models_own_first(session):
    report = report_of(session, EVERY)
    ids = [token.token_id for token in report.prompt]
    logits = session.model(torch.tensor([ids]), every_logit=True)[0]
    earlier = [position for position in report.positions if not position.chosen]
    assert [position.position for position in earlier] == list(range(len(ids) - 1))
    assert [position.choice.token_id for position in earlier] == logits.argmax(-1)[:-1].tolist()
    assert [position.next_token.token_id for position in earlier] == ids[1:]
    assert [position.token_id for position in earlier] == ids[:-1]
    assert {position.step for position in earlier} == {0}


def test_a_position_reads_the_same_alone_and_among_others(session):
    among = report_of(session, EVERY).positions[2]
    (alone,) = report_of(session, LensPlan(("2",))).positions
    assert (alone.position, alone.choice, alone.layers[0].choice_rank) == (
        2,
        among.choice,
        among.layers[0].choice_rank,
    )
    assert alone.attribution.total_logit == pytest.approx(among.attribution.total_logit, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_in_every_family_the_last_layer_and_the_attribution_meet_the_run(family, dtype, folder, tmp_path):
    session = Session.open(with_tokenizer(family, folder, tmp_path / "model"), dtype=dtype)
    config, report = session.model.config, report_of(session, EVERY)
    bound = 2e-4 if dtype == "float32" else 1.0  # logits are up to about 50 here
    assert len(report.positions) == len(TEXT) + 2
    assert 0 < report.last_layer_error == max(p.last_layer_error for p in report.positions) < bound
    for position in report.positions:
        shares = position.attribution
        assert shares.token_id == position.choice.token_id
        assert abs(shares.error_logit) < bound and abs(shares.heads_error_logit) < bound
        written = sum(layer.attention_logit + layer.mlp_logit for layer in shares.layers)
        assert shares.total_logit == pytest.approx(shares.embed_logit + written)
        assert all((layer.bias_logit is not None) == config.o_bias for layer in shares.layers)
        strongest = max(
            (abs(h), layer.layer, i) for layer in shares.layers for i, h in enumerate(layer.head_logits)
        )
        first = shares.strongest_heads[0]
        assert (abs(first.logit), first.layer, first.head) == strongest
        assert first.kv_head == first.head * config.num_key_value_heads // config.num_attention_heads


def test_layers_left_out_are_computed_all_the_same(session):
    whole, (part,) = (
        report_of(session, LensPlan()).positions[0],
        report_of(session, LensPlan(layers=("-1",))).positions,
    )
    assert [layer.layer for layer in part.layers] == [1]
    assert part.layers[0] == whole.layers[1]
    assert (part.first_layer, part.stays_from_layer) == (whole.first_layer, whole.stays_from_layer)
    assert part.attribution == whole.attribution


def test_a_target_is_followed_and_explained_in_place_of_the_choice(session):
    report = report_of(session, LensPlan(steps=2, target="Z", top=260))
    assert report.target.text == "Z"
    for position in report.positions:
        assert position.attribution.token_id == report.target.token_id != position.choice.token_id
        assert abs(position.attribution.error_logit) < 1e-4
        for layer in position.layers:
            assert layer.top[layer.target_rank - 1].token_id == report.target.token_id
            assert layer.top[layer.target_rank - 1].prob == layer.target_prob
            assert math.exp(layer.target_logprob_nats) == pytest.approx(layer.target_prob)


def test_a_token_is_named_by_its_text_or_by_an_id(session):
    five = session.tokenizer.encode("5")[0]
    assert find_token(session, "5") == five
    assert find_token(session, "id:5") == 5
    assert find_token(session, "200") == 200
    assert find_token(session, "<|im_end|>") == 257
    with pytest.raises(InputError, match=r'"Z" "o" "o"'):
        find_token(session, "Zoo")
    for word in ("", "id:", "id:-5", "-1"):
        with pytest.raises(InputError, match="not one"):
            find_token(session, word)
    for word in ("260", "id:260", "id:" + "9" * 5000):
        with pytest.raises(InputError, match="0 to 259"):
            find_token(session, word)


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), {9}), (("-1",), {9}), (("-10",), {0}), (("all",), set(range(10))), (("0,2-4", "9"), {0, 2, 3, 4, 9})],
)
def test_positions_are_chosen_by_words(words, expected):
    assert select_positions(words, 10) == expected


@pytest.mark.parametrize("word", ["10", "-11", "3-2", "0-10", "x", "", "1.5", "--1", "1-", "²", "9" * 5000])
def test_a_position_that_is_none_is_refused(word):
    with pytest.raises(InputError, match=r"0 to 9"):
        select_positions((word,), 10)


def test_more_positions_than_the_budget_holds_are_refused_before_the_run(session, monkeypatch):
    with session.watching(Watch(lens.KEPT, positions={0, 1, 2})) as recording:
        session.run(session.prompt(TEXT, chat=False), max_new_tokens=1, every_logit=True)
    monkeypatch.setattr(lens, "DEFAULT_BUDGET", recording.kept.bytes)
    assert len(report_of(session, LensPlan(("0-2",))).positions) == 3
    with pytest.raises(InputError, match=r"4 positions .*at most 3"):
        report_of(session, LensPlan(("0-2",), steps=1))


@pytest.mark.parametrize("steps", [9, 10**20])
def test_an_answer_that_ends_early_is_told_as_far_as_it_went(session, steps):
    report = report_of(session, LensPlan(steps=steps), "x" * 510)
    assert [position.position for position in report.positions] == [509, 510]
    assert report.notes == ("note.context_limit",)


def test_a_long_prompt_is_read_in_chunks_and_only_its_positions_kept(tmp_path):
    session = Session.open(str(make_tiny_model(tmp_path / "long", max_position_embeddings=2048)))
    text = "abcdefghij" * 120  # three passes
    whole = report_of(session, LensPlan(("0,511,512,-1",)), text)
    assert [position.position for position in whole.positions] == [0, 511, 512, 1199]
    assert [position.text for position in whole.positions] == ["a", "b", "c", "j"]
    assert whole.last_layer_error < 1e-4
    (last,) = report_of(session, LensPlan(), text).positions
    assert last.choice == whole.positions[-1].choice


def test_a_layer_that_is_not_finite_is_a_finding(folder):
    session = Session.open(str(folder))
    clean = report_of(session, LensPlan())
    ids = [token.token_id for token in clean.prompt]
    with torch.inference_mode():
        stream = session.model.model.norm(_stream(session, ids))
        row = torch.zeros(32)
        row[0] = -math.inf if stream[0] > 0 else math.inf
        session.model.lm_head.weight[5] = torch.where(row == 0, torch.tensor(0.0), row)
    with pytest.raises(FindingError, match="layer"):
        report_of(session, LensPlan())


def _stream(session: Session, ids: list[int]) -> torch.Tensor:
    with session.observe(["layers.1.resid_post"]) as recording:
        session.run(session.prompt(TEXT, chat=False), max_new_tokens=1)
    return recording["layers.1.resid_post"][0][-1]


def test_the_starter_comes_to_paris_and_to_beijing(starter_path, all_threads):
    session = Session.open(str(starter_path))
    paris = report_of(session, LensPlan(), "The capital of France is")
    beijing = report_of(session, LensPlan(target="北京", steps=1), "中国的首都是")
    for report, answer in ((paris, " Paris"), (beijing, "北京")):
        (position,) = report.positions
        assert position.choice.text == answer
        assert position.layers[0].choice_rank > 1000 and position.layers[-1].choice_rank == 1
        assert 0 < position.stays_from_layer <= 23
        assert report.last_layer_error < 1e-4
        assert abs(position.attribution.error_logit) < 1e-4
        assert abs(position.attribution.heads_error_logit) < 1e-5
