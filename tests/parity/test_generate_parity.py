"""Ours against transformers on tiny random models of every family: logits, greedy ids, sampled ids."""

import pytest
import torch

from decodescope.generate import Limits, generate
from decodescope.model.checkpoint import load_model
from decodescope.model.kv_cache import KVCache
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from families import BY_NAME, VOCABULARY


def prompt_ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ours_ids(model, prompt: list[int], params: SamplingParams, count: int, **limits) -> list[int]:
    steps = generate(model, [prompt], [Sampler(params)], Limits(count, **limits))
    return [step[0].choice.token_id for step in steps]


def theirs_ids(reference, prompt: list[int], count: int, **settings) -> list[int]:
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=count, pad_token_id=0, **settings)
    return out[0, len(prompt) :].tolist()


def test_logits_equal_at_every_position_within_1e_4(pair):
    ours, theirs = pair
    ids = torch.tensor([prompt_ids(40)])
    expected = theirs(ids).logits
    found = ours(ids, KVCache(3), every_logit=True)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_greedy_ids_equal(pair):
    ours, theirs = pair
    for length in (1, 7, 30):
        prompt = prompt_ids(length, seed=length)
        expected = theirs_ids(theirs, prompt, 24, do_sample=False)
        assert ours_ids(ours, prompt, SamplingParams(), 24) == expected


def test_greedy_ids_equal_in_chunks_and_without_cache(pair):
    ours, theirs = pair
    prompt = prompt_ids(29)
    expected = theirs_ids(theirs, prompt, 12, do_sample=False)
    assert ours_ids(ours, prompt, SamplingParams(), 12, prefill_chunk=4) == expected
    assert ours_ids(ours, prompt, SamplingParams(), 12, use_cache=False) == expected


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.5, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "repetition_penalty": 0.8, "top_k": 30},
    {"temperature": 1.0, "no_repeat_ngram_size": 2},
    {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
    },
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.05},
]
GREEDY = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.05},
]


@pytest.fixture(scope="module")
def sampling_pair(tiny_folders):
    name = "qwen2-gqa"
    return load_model(tiny_folders[name])[0], BY_NAME[name].reference()


@pytest.mark.parametrize("seed", [0, 1, 42, 1234567, 2**31])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampled_ids_equal_torch_manual_seed_and_generate(sampling_pair, settings, seed):
    ours, theirs = sampling_pair
    prompt = prompt_ids(9, seed=seed % 1000)
    torch.manual_seed(seed)
    # top_k is passed even when off: transformers 5 would silently add 50.
    expected = theirs_ids(theirs, prompt, 24, do_sample=True, **{"top_k": 0, **settings})
    assert ours_ids(ours, prompt, SamplingParams(**settings, seed=seed), 24) == expected


@pytest.mark.parametrize("settings", GREEDY, ids=str)
def test_greedy_ids_with_penalties_equal(sampling_pair, settings):
    ours, theirs = sampling_pair
    prompt = prompt_ids(9)
    assert ours_ids(ours, prompt, SamplingParams(**settings), 30) == theirs_ids(
        theirs, prompt, 30, do_sample=False, **settings
    )


@pytest.mark.parametrize("seed", range(8))
def test_sampled_ids_equal_on_every_family(pair, seed):
    ours, theirs = pair
    prompt = prompt_ids(11, seed)
    torch.manual_seed(seed)
    expected = theirs_ids(theirs, prompt, 16, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert ours_ids(ours, prompt, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=seed), 16) == expected
