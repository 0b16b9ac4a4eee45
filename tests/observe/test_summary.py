"""A choice summed up: hand-worked distributions, stages, ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodescope.observe.summary import Distribution, highest, summarise
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Choice, Sampler

HALVES = torch.log(torch.tensor([0.125, 0.5, 0.25, 0.125]))  # probabilities worked out by hand


def spell(token_id: int) -> tuple[str, str]:
    return f"<{token_id}>", f"{token_id:02x}"


def summary_of(logits: torch.Tensor, count: int = 4, **params):
    choice = Sampler(SamplingParams(**params)).choose(logits, [], [])
    return choice, summarise(choice, count, spell)


def test_entropy_and_probability_of_a_distribution_worked_by_hand():
    _, summary = summary_of(HALVES + 3.0)
    assert summary.entropy_nats == pytest.approx(1.75 * math.log(2), abs=1e-6)
    assert summary.prob == pytest.approx(0.5, abs=1e-6)
    assert summary.logprob_nats == pytest.approx(-math.log(2), abs=1e-6)
    assert summary.margin_logits == pytest.approx(math.log(2), abs=1e-6)
    assert summary.rank == 1
    assert [c.token_id for c in summary.candidates][:2] == [1, 2]
    assert sum(c.prob_raw for c in summary.candidates) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("size", [2, 97, 152064])
def test_uniform_entropy_is_the_logarithm_of_the_vocabulary(size):
    _, summary = summary_of(torch.zeros(size))
    assert summary.entropy_nats == pytest.approx(math.log(size), abs=2e-4)


def test_certainty_has_no_entropy_and_no_nan():
    _, summary = summary_of(torch.tensor([0.0, 500.0, 0.0]))
    assert summary.entropy_nats == 0
    assert summary.prob == 1


def test_stages_tell_survivors_kept_mass_and_who_removed_whom():
    _, summary = summary_of(HALVES, temperature=1.0, top_k=3, top_p=0.6, seed=1)
    by_name = {stage.name: stage for stage in summary.stages}
    assert by_name["top_k"].survivors == 4  # the two of 0.125 tie and both stay
    assert by_name["top_p"].survivors == 2
    assert by_name["top_p"].kept_mass == pytest.approx(0.75, abs=1e-6)
    assert {c.token_id: c.removed_by for c in summary.candidates} == {1: None, 2: None, 0: "top_p", 3: "top_p"}
    final = {c.token_id: c.prob_final for c in summary.candidates}
    assert final[1] == pytest.approx(2 / 3, abs=1e-6) and final[0] == 0


def test_each_stage_keeps_mass_of_the_distribution_that_entered_it():
    _, summary = summary_of(HALVES, temperature=0.5, top_k=1, seed=0)
    squared = [p * p for p in (0.125, 0.5, 0.25, 0.125)]
    stage = summary.stages[-1]
    assert stage.name == "top_k"
    assert stage.kept_mass == pytest.approx(0.25 / sum(squared), abs=1e-6)
    assert stage.entropy_nats == 0


def test_the_chosen_token_is_listed_wherever_it_ranks():
    choice = Choice(0, torch.tensor([-5.0, 3.0, 2.0, 1.0, 0.0]), (), drawn=False, forced=True)
    summary = summarise(choice, 2, spell)
    assert [(c.rank, c.token_id) for c in summary.candidates] == [(1, 1), (2, 2), (5, 0)]
    assert summary.rank == 5


def test_ranks_are_places_even_among_equals():
    choice = Choice(3, torch.tensor([1.0, 1.0, 1.0, 1.0]), (), drawn=False, forced=True)
    assert [(c.rank, c.token_id) for c in summarise(choice, 2, spell).candidates] == [(1, 0), (2, 1), (4, 3)]


def test_removed_tokens_add_nothing_to_a_distribution():
    measured = Distribution.of(np.array([0.0, -np.inf, 0.0], dtype=np.float32))
    assert measured.entropy_nats == pytest.approx(math.log(2))
    assert measured.survivors == 2


@given(st.lists(st.sampled_from([-60.0, -3.0, 0.0, 0.5, 7.0, 30.0]), min_size=1, max_size=40), st.integers(1, 45))
def test_the_highest_are_those_of_a_stable_sort(values, count):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert highest(np.array(values, dtype=np.float32), count).tolist() == expected


@pytest.mark.parametrize("order", ["as they come", "ascending", "descending", "few values", "most removed"])
@pytest.mark.parametrize("size", [255, 65_535, 65_536, 151_936])
def test_so_are_those_of_a_whole_vocabulary(order, size):
    logits = np.random.default_rng(size).normal(size=size).astype(np.float32)
    if order == "few values":
        logits = np.round(logits)
    elif order == "most removed":
        logits[np.arange(size) % 5000 > 0] = -np.inf
    elif order != "as they come":
        logits = np.sort(logits)[:: 1 if order == "ascending" else -1].copy()
    for count in (1, 50, 200, 300):
        assert highest(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


def test_the_first_candidate_is_the_argmax_in_a_tie():
    choice, summary = summary_of(torch.tensor([1.0, 5.0, 5.0]))
    assert choice.token_id == summary.candidates[0].token_id == 1


def test_a_distribution_of_enormous_logits_is_certain():
    measured = Distribution.of(np.array([3e38, -3e38, 0.0], dtype=np.float32))
    assert measured.entropy_nats == 0
