"""The draw: torch's own stream, true frequencies, repeatable, and never made from what is no distribution."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decodescope.errors import FindingError, InputError
from decodescope.sampling.draw import DrawStream, exponential_is_a_logarithm
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler


def random_logits(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def draws(sampler: Sampler, logits: Tensor, count: int) -> list[int]:
    return [sampler.choose(logits, [], []).token_id for _ in range(count)]


@pytest.fixture(params=[True, False], ids=["uniform", "exponential"])
def uniform(request: pytest.FixtureRequest) -> bool:
    """Both ways to a draw: from uniform numbers, and from the exponential ones that torch makes itself."""
    if request.param and not exponential_is_a_logarithm():
        pytest.skip("this torch makes exponential variates otherwise; ends on a build that makes them one by one")
    return request.param


@pytest.mark.parametrize("size", [1, 2, 7, 97, 1000, 151_936])
@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**40 + 7, 2**63 - 1])
def test_the_draw_is_torch_multinomial_with_the_same_generator(size, seed, uniform):
    logits = random_logits(size)
    generator = torch.Generator().manual_seed(seed)
    expected = [int(torch.multinomial(logits.softmax(-1), 1, generator=generator)) for _ in range(8)]
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), DrawStream(seed, uniform))
    assert draws(sampler, logits, 8) == expected


@pytest.mark.parametrize("spread", [0, 0.01, 1, 30], ids=lambda spread: f"spread {spread}")
def test_it_is_so_for_flat_and_for_steep_distributions(spread, uniform):
    probs = (random_logits(3000) * spread).softmax(-1)
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        expected = [int(torch.multinomial(probs, 1, generator=generator)) for _ in range(3)]
        assert [DrawStream(seed, uniform).winner(number, probs) for number in range(3)] == expected


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


SEVEN = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])


@pytest.mark.parametrize(
    ("settings", "left"),
    [({}, 7), ({"top_k": 5}, 5), ({"temperature": 1.7, "top_k": 6, "min_p": 0.2}, 6),
     ({"temperature": 0.5, "top_p": 0.95, "sampler": "llamacpp"}, 5), ({"temperature": 2.0, "min_p": 0.3, "top_p": 0.9, "sampler": "vllm"}, 5)],
    ids=str,
)  # fmt: skip
def test_20000_draws_follow_the_final_distribution(settings, left):
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 2024, **settings}))
    expected = 20_000 * sampler.choose(SEVEN.log(), [], []).final.softmax(-1).double()
    found = torch.bincount(torch.tensor(draws(sampler, SEVEN.log(), 20_000)), minlength=7)
    assert int((expected > 0).sum()) == left and not found[expected == 0].any()
    square = (found - expected) ** 2 / expected
    # With 6 degrees of freedom, and sooner with fewer, this is exceeded once in a thousand seeds.
    assert float(square[expected > 0].sum()) < 22.46
    turned = (found[:left].flip(0) - expected[:left]) ** 2 / expected[:left]
    assert float(turned.sum()) > 22.46  # the test can fail


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
    assert draws(sampler, torch.tensor([1.0, 2.0, 2.0]), 5) == [1] * 5
    assert sampler.draws == 0


def test_a_draw_has_a_number_and_is_made_again_under_it(uniform):
    sampler, logits = (
        Sampler(SamplingParams(temperature=1.0, seed=11), DrawStream(11, uniform)),
        random_logits(50) / 3,
    )
    made = draws(sampler, logits, 30)
    assert sampler.draws == 30 and len(set(made)) > 10
    for number in (29, 0, 12, 13, 5, 5, 29, 28):
        sampler.draws = number
        assert draws(sampler, logits, 1) == [made[number]], number
        assert sampler.draws == number + 1


def test_a_draw_ahead_is_that_of_a_sampler_that_made_all_before_it(uniform):
    logits = random_logits(50)
    all_made = draws(Sampler(SamplingParams(temperature=1.0, seed=3)), logits, 20)
    late = Sampler(SamplingParams(temperature=1.0, seed=3), DrawStream(3, uniform))
    late.draws = 12
    assert draws(late, logits, 8) == all_made[12:]


def test_a_vocabulary_of_another_size_starts_its_own_numbers(uniform):
    stream = DrawStream(6, uniform)
    sizes = (50, 70, 50, 1)
    alone = [DrawStream(6, uniform).winner(4, random_logits(size).softmax(-1)) for size in sizes]
    assert [stream.winner(4, random_logits(size).softmax(-1)) for size in sizes] == alone


def test_settings_may_change_between_two_steps_and_the_draws_go_on():
    logits = random_logits(60) / 3
    plain, changed = (Sampler(SamplingParams(temperature=1.0, seed=8)) for _ in range(2))
    expected = draws(plain, logits, 20)
    first = draws(changed, logits, 10)
    changed.params = replace(changed.params, temperature=1.6)
    hotter = draws(changed, logits, 5)
    changed.params = replace(changed.params, temperature=1.0)
    assert first + draws(changed, logits, 5) == expected[:10] + expected[15:]
    assert hotter != expected[10:15]


def test_a_greedy_row_that_is_warmed_draws_from_the_first_number_of_its_seed():
    logits = random_logits(60)
    sampler = Sampler(SamplingParams(seed=8))
    draws(sampler, logits, 4)
    sampler.params = replace(sampler.params, temperature=1.0)
    assert draws(sampler, logits, 6) == draws(Sampler(SamplingParams(temperature=1.0, seed=8)), logits, 6)


# Rows with one seed


SETTINGS = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 30}, {"temperature": 1.3, "top_p": 0.9}, {}]


def test_rows_that_share_a_stream_draw_what_they_draw_alone():
    rows = [(SamplingParams(**values, seed=seed), seed) for seed in (42, 7, 1) for values in SETTINGS]
    streams = {seed: DrawStream(seed) for seed in (42, 7, 1)}
    shared = [Sampler(params, streams[seed]) for params, seed in rows]
    steps = [random_logits(200, seed=step) for step in range(10)]
    together = [[row.choose(logits, [], []).token_id for row in shared] for logits in steps]
    alone = [Sampler(params) for params, _ in rows]
    for row, sampler in enumerate(alone):
        assert [sampler.choose(logits, [], []).token_id for logits in steps] == [ids[row] for ids in together]


def test_twelve_rows_with_three_seeds_make_three_vectors_of_numbers_a_step(monkeypatch):
    made: list[int] = []
    for name in ("uniform_", "exponential_"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda *given, original=original, **named: (made.append(1), original(*given, **named))[1]
        )
    streams = [DrawStream(seed) for seed in (42, 7, 1)]
    made.clear()
    rows = [Sampler(SamplingParams(temperature=1.0 + n), stream) for stream in streams for n in range(4)]
    for step in range(5):
        for row in rows:
            row.choose(random_logits(200, seed=step), [], [])
    assert len(made) == 15


def test_a_stream_of_another_seed_is_refused():
    with pytest.raises(ValueError, match="seed 3 cannot draw from the stream of seed 4"):
        Sampler(SamplingParams(seed=3), DrawStream(4))
    assert Sampler(SamplingParams(), DrawStream(4)).seed == 4


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
