"""Every filter: worked out by hand on four tokens, and equal to transformers' processor on anything."""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.sampling import filters
from decodescope.sampling.filters import REMOVED
from decodescope.sampling.orders import PRESETS
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler

INF = math.inf
PROBS = [0.5, 0.25, 0.15, 0.1]
FOUR = torch.tensor(PROBS).log()


def survivors(logits: Tensor) -> list[int]:
    return torch.nonzero(logits > REMOVED)[:, 0].tolist()


# Four tokens by hand


@pytest.mark.parametrize(
    ("k", "left"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (10**30, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_highest(k, left):
    found = filters.top_k(FOUR, k)
    assert survivors(found) == left
    assert torch.equal(found[left], FOUR[left])


def test_top_k_keeps_all_that_tie_with_the_last():
    assert survivors(filters.top_k(torch.tensor([1.0, 3.0, 1.0, 0.0]), 2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("p", "left"),
    [
        (0.01, [0]),
        (0.49, [0]),
        (0.51, [0, 1]),
        (0.74, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p, left):
    found = filters.top_p(FOUR, p)
    assert survivors(found) == left
    assert torch.equal(found[left], FOUR[left])


def test_top_p_keeps_the_highest_ids_among_equals():
    assert survivors(filters.top_p(torch.zeros(4), 0.5)) == [2, 3]
    # 40 20 20 20 %: two of the three equals are needed for 0.7.
    assert survivors(filters.top_p(torch.tensor([0.2, 0.4, 0.2, 0.2]).log(), 0.7)) == [1, 2, 3]
    assert survivors(filters.top_p(torch.tensor([0.2, 0.4, 0.2, 0.2]).log(), 0.5)) == [1, 3]


@pytest.mark.parametrize(
    ("fraction", "left"), [(0.19, [0, 1, 2, 3]), (0.21, [0, 1, 2]), (0.31, [0, 1]), (0.51, [0]), (1.0, [0])]
)
def test_min_p_keeps_what_is_near_the_best(fraction, left):
    assert survivors(filters.min_p(FOUR, fraction)) == left


@pytest.mark.parametrize("value", [0.25, 0.5, 1.0, 2.0, 10.0])
def test_temperature_is_the_exponent_of_the_probabilities(value):
    powered = FOUR.double().exp() ** (1 / value)
    found = filters.temperature(FOUR, value).softmax(-1).double()
    torch.testing.assert_close(found, powered / powered.sum(), rtol=1e-6, atol=0)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = torch.tensor([2.0, -2.0, 3.0, -3.0])
    found = filters.repetition_penalty(logits, [0, 1, 1, 0, 0], 2.0)
    assert found.tolist() == [1.0, -4.0, 3.0, -3.0]
    assert filters.repetition_penalty(logits, [2, 3], 0.5).tolist() == [2.0, -2.0, 6.0, -1.5]
    assert filters.repetition_penalty(logits, [], 2.0).tolist() == logits.tolist()


def test_presence_penalty_subtracts_once_and_frequency_penalty_each_time():
    logits, generated = torch.tensor([1.0, 2.0, -3.0, 0.0]), [1, 2, 1, 1]
    assert filters.presence_penalty(logits, generated, 0.5).tolist() == [1.0, 1.5, -3.5, 0.0]
    assert filters.frequency_penalty(logits, generated, 0.5).tolist() == [1.0, 0.5, -3.5, 0.0]
    assert filters.presence_penalty(logits, generated, -1.0).tolist() == [1.0, 3.0, -2.0, 0.0]
    assert filters.frequency_penalty(logits, [], 0.5).tolist() == logits.tolist()


@pytest.mark.parametrize(
    ("ids", "size", "banned"),
    [([0, 1, 0], 2, [1]), ([0, 1, 2, 0, 1], 3, [2]), ([0, 1, 0, 2, 0], 2, [1, 2]), ([3, 3], 1, [3]), ([0, 1, 2], 2, []),
     ([1, 1, 1], 2, [1]), ([1, 1, 1], 3, [1]), ([1, 1], 3, []), ([], 1, []), ([], 3, []), ([2], 2, []), ([0, 1, 2], 9, [])],
    ids=str,
)  # fmt: skip
def test_no_token_completes_an_n_gram_that_is_already_there(ids, size, banned):
    found = filters.no_repeat_ngram(FOUR, ids, size)
    assert survivors(found) == [i for i in range(4) if i not in banned]


def test_the_penalties_reach_what_their_names_say():
    """The repetition penalty counts the prompt, presence and frequency count only what was generated."""
    logits = torch.tensor([4.0, 4.0, 4.0, 4.0])
    for name, value, expected in (
        ("repetition_penalty", 2.0, [2.0, 2.0, 4.0, 4.0]),
        ("presence_penalty", 1.0, [4.0, 3.0, 4.0, 4.0]),
        ("frequency_penalty", 1.0, [4.0, 2.0, 4.0, 4.0]),
    ):
        choice = Sampler(SamplingParams(**{name: value})).choose(logits, [0, 0], [1, 1])
        assert choice.final.tolist() == expected, name
    banned = Sampler(SamplingParams(no_repeat_ngram_size=2)).choose(logits, [0, 3], [0])
    assert survivors(banned.final) == [0, 1, 2]


def test_no_filter_changes_the_logits_it_was_given():
    logits, ids = torch.tensor([1.0, -1.0, 0.5, 0.25]), [0, 1, 0]
    before = logits.clone()
    filters.repetition_penalty(logits, ids, 1.5)
    filters.presence_penalty(logits, ids, 1.5)
    filters.frequency_penalty(logits, ids, 1.5)
    filters.no_repeat_ngram(logits, ids, 2)
    filters.temperature(logits, 0.7)
    filters.top_k(logits, 2)
    filters.top_p(logits, 0.5)
    filters.min_p(logits, 0.5)
    assert torch.equal(logits, before)


# Equal to transformers on anything

LEVELS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -30.0, 80.0, -INF])  # ties on purpose
ANY = st.floats(-40, 40, width=32)
logits = st.one_of(
    st.lists(ANY, min_size=1, max_size=40), st.lists(LEVELS, min_size=1, max_size=12), st.lists(ANY | LEVELS, min_size=1, max_size=40)
).map(torch.tensor).filter(lambda x: bool(torch.isfinite(x.max())))  # fmt: skip
percent = st.integers(1, 99).map(lambda n: n / 100) | st.floats(1e-6, 0.999999)


def equal(
    found: Tensor, processor: transformers.LogitsProcessor, given: Tensor, ids: list[int] | None = None
) -> None:
    expected = processor(torch.tensor([ids or []], dtype=torch.long), given[None].clone())[0]
    assert torch.equal(found, expected)


check = settings(max_examples=200, derandomize=True, deadline=None)


@check
@given(logits, st.integers(1, 50))
def test_top_k_equals_transformers(x, k):
    equal(filters.top_k(x, k), transformers.TopKLogitsWarper(k), x)


@check
@given(logits, percent)
def test_top_p_equals_transformers(x, p):
    equal(filters.top_p(x, p), transformers.TopPLogitsWarper(p), x)


@pytest.mark.parametrize("size", [1, 2, 17, 1000, 50_000])
@pytest.mark.parametrize("step", [0.0, 0.5, 4.0], ids=lambda step: f"step {step}")
@pytest.mark.parametrize("removed", [False, True])
def test_filters_equal_transformers_on_large_vocabularies_full_of_equals(size, step, removed):
    """`step` is the distance of neighbouring logits (0: all differ), as it comes about in 16 bits."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    if step:
        x = (x / step).round() * step
    if removed:
        x[::3] = REMOVED
        x[size // 2] = 1.5
    for p in (0.01, 0.5, 0.9, 0.999):
        equal(filters.top_p(x, p), transformers.TopPLogitsWarper(p), x)
        equal(filters.min_p(x, p), transformers.MinPLogitsWarper(p), x)
    for k in (1, 20, 4000):
        equal(filters.top_k(x, k), transformers.TopKLogitsWarper(k), x)


@check
@given(logits, percent | st.just(1.0))
def test_min_p_equals_transformers(x, fraction):
    equal(filters.min_p(x, fraction), transformers.MinPLogitsWarper(fraction), x)


@check
@given(logits, st.floats(0.01, 100))
def test_temperature_equals_transformers(x, value):
    equal(filters.temperature(x, value), transformers.TemperatureLogitsWarper(value), x)


@check
@given(logits, st.floats(0.1, 10), st.data())
def test_repetition_penalty_equals_transformers(x, penalty, data):
    ids = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=30))
    equal(
        filters.repetition_penalty(x, ids, penalty), transformers.RepetitionPenaltyLogitsProcessor(penalty), x, ids
    )


@check
@given(logits, st.integers(1, 5), st.data())
def test_no_repeat_ngram_equals_transformers(x, size, data):
    ids = data.draw(st.lists(st.integers(0, min(len(x) - 1, 3)), min_size=1, max_size=30))
    equal(filters.no_repeat_ngram(x, ids, size), transformers.NoRepeatNGramLogitsProcessor(size), x, ids)


@check
@given(st.data())
def test_the_whole_chain_in_its_default_order_equals_transformers(data):
    x = data.draw(st.lists(ANY, min_size=8, max_size=60).map(torch.tensor))
    ids = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=12))
    values = data.draw(
        st.fixed_dictionaries(
            {"temperature": st.floats(0.1, 5)},
            optional={
                "top_k": st.integers(1, 20),
                "top_p": percent,
                "min_p": percent,
                "repetition_penalty": st.floats(0.5, 2),
                "no_repeat_ngram_size": st.integers(2, 3),
            },
        )
    )
    processors = transformers.LogitsProcessorList()
    for name, make in (
        ("repetition_penalty", transformers.RepetitionPenaltyLogitsProcessor),
        ("no_repeat_ngram_size", transformers.NoRepeatNGramLogitsProcessor),
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in values:
            processors.append(make(values[name]))
    expected = processors(torch.tensor([ids]), x[None].clone())[0]
    choice = Sampler(SamplingParams(**values, seed=1)).choose(x, ids[:1], ids[1:])
    assert torch.equal(choice.final, expected)


def test_the_default_order_is_the_one_in_which_transformers_builds_its_list():
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
    ))  # fmt: skip
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
    )
    built = model._get_logits_processor(
        settings, input_ids_seq_length=1, logits_processor=transformers.LogitsProcessorList()
    )
    names = {"RepetitionPenalty": "repetition_penalty", "NoRepeatNGram": "no_repeat_ngram_size", "Temperature": "temperature",
             "TopK": "top_k", "TopP": "top_p", "MinP": "min_p"}  # fmt: skip
    order = [next(ours for theirs, ours in names.items() if type(p).__name__.startswith(theirs)) for p in built]
    assert order == [name for name in PRESETS["hf"].order if name not in ("presence_penalty", "frequency_penalty")]


# Laws


@check
@given(logits, percent)
def test_top_p_keeps_a_mass_of_at_least_p_and_no_token_too_many(x, p):
    probs = x.double().softmax(-1)
    kept = filters.top_p(x, p) > REMOVED
    mass = float(probs[kept].sum())
    assert mass >= p - 1e-6
    assert kept.sum() == 1 or mass - float(probs[kept].min()) < p + 1e-6
    if not kept.all():
        assert probs[kept].min() >= probs[~kept].max()


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("seed", range(5))
def test_the_mass_is_right_over_a_real_vocabulary_too(seed, p):
    x = torch.randn(151_936, generator=torch.Generator().manual_seed(seed)) * (0.5 + seed)
    probs = x.double().softmax(-1)
    kept = filters.top_p(x, p) > REMOVED
    mass = float(probs[kept].sum())
    assert p - 1e-6 <= mass and (kept.sum() == 1 or mass - float(probs[kept].min()) < p + 1e-6)
    assert kept.all() or probs[kept].min() >= probs[~kept].max()


@check
@given(logits, st.integers(1, 50), percent)
def test_a_filter_keeps_the_best_token_and_repeating_it_changes_nothing(x, k, p):
    best = x == x.max()
    for filtered in (lambda y: filters.top_k(y, k), lambda y: filters.min_p(y, p)):
        once = filtered(x)
        assert (once[best] == x.max()).all()
        assert torch.equal(filtered(once), once)
    assert (filters.top_p(x, p) == x.max()).any()


def test_where_everything_is_removed_filters_pass_it_on_as_transformers_does():
    nothing = torch.full((5,), REMOVED)
    equal(filters.top_p(nothing, 0.5), transformers.TopPLogitsWarper(0.5), nothing)
    equal(filters.top_k(nothing, 2), transformers.TopKLogitsWarper(2), nothing)
    equal(filters.min_p(nothing, 0.5), transformers.MinPLogitsWarper(0.5), nothing)
