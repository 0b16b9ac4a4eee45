"""The draw: torch's own stream, true frequencies, repeatable, and never made from what is no distribution."""

import math

import pytest
import torch
from torch import Tensor

from decodescope.errors import FindingError, InputError
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler


def random_logits(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def draws(sampler: Sampler, logits: Tensor, count: int) -> list[int]:
    return [sampler.choose(logits, [], []).token_id for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 7, 97, 1000, 151_936])
@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**40 + 7, 2**63 - 1])
def test_the_draw_is_torch_multinomial_with_the_same_generator(size, seed):
    logits = random_logits(size)
    generator = torch.Generator().manual_seed(seed)
    expected = [int(torch.multinomial(logits.softmax(-1), 1, generator=generator)) for _ in range(8)]
    assert draws(Sampler(SamplingParams(temperature=1.0, seed=seed)), logits, 8) == expected


def test_it_is_so_for_many_seeds_and_after_every_filter():
    logits = random_logits(300) / 3
    params = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
    seen = set()
    for seed in range(300):
        choice = Sampler(SamplingParams(**params, seed=seed)).choose(logits, [], [])
        generator = torch.Generator().manual_seed(seed)
        assert choice.token_id == int(torch.multinomial(choice.final.softmax(-1), 1, generator=generator))
        seen.add(choice.token_id)
    assert len(seen) > 5


def test_frequencies_follow_the_probabilities():
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    count = 20_000
    drawn = draws(Sampler(SamplingParams(temperature=1.0, seed=2024)), probs.log(), count)
    expected = probs * count
    found = torch.bincount(torch.tensor(drawn), minlength=7)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 22.46  # six degrees of freedom: exceeded once in a thousand seeds
    assert float(((found.flip(0) - expected) ** 2 / expected).sum()) > 22.46  # and the test can fail


def test_a_removed_token_is_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    assert set(draws(Sampler(SamplingParams(temperature=1.0, seed=3)), logits, 300)) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_temperature_near_0_is_the_greedy_choice(temperature):
    for seed in range(20):
        logits = random_logits(500, seed)
        greedy = Sampler(SamplingParams()).choose(logits, [], [])
        cold = Sampler(SamplingParams(temperature=temperature, seed=seed)).choose(logits, [], [])
        assert (cold.token_id, greedy.drawn, cold.drawn) == (greedy.token_id, False, True)


def test_greedy_takes_the_first_of_equals_and_draws_no_random_number():
    sampler = Sampler(SamplingParams(seed=5))
    before = sampler.state()
    assert draws(sampler, torch.tensor([1.0, 2.0, 2.0]), 5) == [1] * 5
    assert torch.equal(sampler.state(), before)


def test_a_restored_state_repeats_the_draws():
    sampler, logits = Sampler(SamplingParams(temperature=1.0, seed=11)), random_logits(50)
    draws(sampler, logits, 5)
    state = sampler.state()
    first = draws(sampler, logits, 30)
    assert draws(sampler, logits, 30) != first
    sampler.restore(state)
    assert draws(sampler, logits, 30) == first


def test_two_samplers_and_torchs_own_stream_do_not_disturb_each_other():
    logits = random_logits(50)
    alone = [draws(Sampler(SamplingParams(temperature=1.0, seed=seed)), logits, 20) for seed in (1, 2)]
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    one, two = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (1, 2))
    mixed: list[list[int]] = [[], []]
    for _ in range(20):
        mixed[0] += draws(one, logits, 1)
        mixed[1] += draws(two, logits, 1)
    assert mixed == alone
    assert torch.equal(torch.rand(3), expected)


def test_without_a_seed_every_sampler_has_its_own_and_tells_it():
    one, two = (Sampler(SamplingParams(temperature=1.0)) for _ in range(2))
    assert one.seed != two.seed
    again = Sampler(SamplingParams(temperature=1.0, seed=one.seed))
    logits = random_logits(50)
    assert draws(again, logits, 10) == draws(one, logits, 10)


def test_a_choice_shows_every_stage_that_ran_and_nothing_else():
    logits = random_logits(60).to(torch.bfloat16)
    params = SamplingParams(temperature=0.7, top_k=10, repetition_penalty=1.1, seed=1)
    choice = Sampler(params).choose(logits, [3], [4])
    assert [(stage.name, stage.value) for stage in choice.stages] == [
        ("repetition_penalty", 1.1), ("temperature", 0.7), ("top_k", 10),
    ]  # fmt: skip
    assert choice.raw.dtype == torch.float32 and torch.equal(choice.raw, logits.float())
    assert choice.final is choice.stages[-1].logits
    assert Sampler(SamplingParams()).choose(logits, [], []).stages == ()


# What is no distribution is said, not drawn from

EVERY = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", EVERY, ids=lambda params: "+".join(params.chain()) or str(params.temperature))
def test_logits_that_are_no_numbers_are_a_finding(params, bad):
    logits = random_logits(20)
    logits[4] = bad
    with pytest.raises(FindingError) as caught:
        Sampler(params).choose(logits.to(torch.bfloat16), [1], [2, 3])
    assert caught.value.values == {"step": 2, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "params",
    [dict(temperature=1e-45), dict(temperature=5e-324), dict(temperature=1.0, repetition_penalty=1e-300),
     dict(repetition_penalty=1e-300), dict(temperature=1.0, no_repeat_ngram_size=1), dict(no_repeat_ngram_size=1),
     dict(temperature=0.7, top_k=2, top_p=0.5, min_p=0.5, no_repeat_ngram_size=1)],
    ids=str,
)  # fmt: skip
def test_settings_that_overflow_or_ban_everything_are_said_not_drawn_from(params):
    logits = torch.tensor([2.0, 1.0, 0.5])
    with pytest.raises(InputError) as caught:
        Sampler(SamplingParams(**params)).choose(logits, [0, 1], [2])
    assert caught.value.key == "sampling.nothing_left" and "step 1" in str(caught.value)


def test_a_few_infinities_below_are_no_fault():
    logits = torch.tensor([1.0, -math.inf, 0.0])
    assert Sampler(SamplingParams()).choose(logits, [], []).token_id == 0
