"""The logit lens: worked by hand, against the run's own logits in every family, and the law of ranks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from watched import of_layers, unembedding, watched_pass

from decodescope.analysis import lens
from decodescope.analysis.lens import (
    Reading,
    TokenPath,
    Unembedding,
    first_nonfinite,
    largest_difference,
    read_positions,
)
from decodescope.observe.summary import highest

THREE_TOKENS = Unembedding(torch.tensor([1.0, 2.0]), 0.5, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))


def of(*rows: list[float]) -> Reading:
    return Reading.of(torch.tensor(rows))


def test_norm_and_head_are_applied_as_the_formula_says():
    scale = 1 / math.sqrt((9 + 16) / 2 + 0.5)
    expected = torch.tensor([[3 * scale, 8 * scale, 11 * scale]])
    torch.testing.assert_close(THREE_TOKENS.logits(torch.tensor([[3.0, 4.0]])), expected)


def test_entropy_and_divergence_are_those_worked_out_by_hand():
    skewed = [math.log(0.5), math.log(0.25), math.log(0.25)]
    reading = of([7.0, 7.0, 7.0], skewed)
    assert reading.entropy_nats() == pytest.approx([math.log(3), 1.5 * math.log(2)])
    divergence = 0.5 * math.log(1.5) + 0.5 * math.log(0.75)
    assert reading.kl_nats(torch.tensor(skewed)) == pytest.approx([divergence, 0.0], abs=1e-7)


def test_a_hopeless_token_costs_the_entropy_no_digits():
    reading = of([0.0, -3000.0], [3e38, 0.0])
    assert reading.entropy_nats() == [0.0, 0.0]
    assert reading.kl_nats(torch.tensor([0.0, -3000.0])) == [0.0, 0.0]


def test_of_equals_the_lower_id_comes_first():
    reading = of([1.0, 3.0, 3.0, 2.0])
    assert [reading.path(i).ranks for i in range(4)] == [(4,), (1,), (2,), (3,)]
    assert [token_id for token_id, _ in reading.top(3)[0]] == [1, 2, 3]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_ranks_are_those_of_a_run(values):
    logits = torch.tensor([values], dtype=torch.float32)
    order = highest(logits[0].numpy(), len(values)).tolist()
    reading = Reading.of(logits)
    assert [reading.path(token_id).ranks[0] for token_id in order] == list(range(1, len(values) + 1))
    assert [token_id for token_id, _ in reading.top(len(values) + 5)[0]] == order


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=9))
def test_a_token_has_one_probability_however_it_is_asked_for(values):
    reading = of(values)
    for token_id, prob in reading.top(len(values))[0]:
        path = reading.path(token_id)
        assert path.probs[0] == prob == pytest.approx(math.exp(path.logprobs_nats[0]))
    assert sum(prob for _, prob in reading.top(len(values))[0]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ranks", "first", "stays"),
    [
        ((1, 1, 1), 0, 0),
        ((3, 1, 2, 1, 1), 1, 3),
        ((9, 5, 1), 2, 2),
        ((1, 2, 2), 0, None),
        ((2, 4, 2), None, None),
    ],
)
def test_where_a_token_comes_to_the_top_and_where_it_stays(ranks, first, stays):
    path = TokenPath(ranks, (0.0,) * len(ranks), (1.0,) * len(ranks))
    assert (path.first_layer, path.stays_from_layer) == (first, stays)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_last_layer_says_what_the_run_says(family, tiny_folders, dtype, tolerance):
    model, recording, logits = watched_pass(tiny_folders[family.name], dtype)
    streams = torch.stack([*of_layers(model, recording, "resid_post")], dim=1)  # T L D
    readings = list(read_positions(streams, unembedding(model)))
    assert len(readings) == len(logits)
    for reading, own in zip(readings, logits, strict=True):
        assert reading.logits.dtype == torch.float32
        assert reading.logits.shape == (model.config.num_hidden_layers, model.config.vocab_size)
        assert largest_difference(reading.logits[-1], own) < tolerance * float(logits.abs().max())


def test_an_earlier_layer_says_what_a_model_that_ends_there_would_say(tiny_folders):
    model, recording, _ = watched_pass(tiny_folders["qwen3-gqa"], "float32")
    (middle,) = read_positions(recording["layers.1.resid_post"][0][-1:, None], unembedding(model))
    expected = model.lm_head(model.model.norm(recording["layers.1.resid_post"][0][-1]))
    torch.testing.assert_close(middle.logits[0], expected)


def test_blocks_change_nothing(monkeypatch):
    streams = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    whole = [reading.logits for reading in read_positions(streams, THREE_TOKENS)]
    monkeypatch.setattr(lens, "LOGITS_AT_ONCE", 2 * 3 * 3)
    monkeypatch.setattr(lens, "_WEIGHTS_AT_ONCE", 4)
    cut = [reading.logits for reading in read_positions(streams, THREE_TOKENS)]
    torch.testing.assert_close(torch.stack(cut), torch.stack(whole))


def test_the_first_layer_that_is_not_finite_is_named():
    assert first_nonfinite(torch.zeros(3, 2)) is None
    assert first_nonfinite(torch.tensor([[0.0, 1.0], [math.nan, 0.0], [-math.inf, 0.0]])) == 1
