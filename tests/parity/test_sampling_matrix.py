"""Sampled ids against transformers' `generate` over settings crossed with each other, and over a real vocabulary."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decodescope.generate import Limits, generate
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from families import BY_NAME, Family

PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.9},
]
MATRIX = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, **penalties}
    for temperature, top_k, top_p, min_p, penalties in product(
        (0.6, 1.8), (0, 3, 25), (1.0, 0.85, 0.3), (0.0, 0.08), PENALTIES
    )
]
SEEDS = (3, 2_000_000_011)


def test_the_matrix_has_over_200_settings_and_seeds():
    assert len(MATRIX) * len(SEEDS) >= 200


@pytest.fixture(scope="module")
def pair(tiny_folders: dict[str, Path]) -> tuple[CausalLM, transformers.PreTrainedModel]:
    name = "qwen3-gqa"
    return load_model(tiny_folders[name])[0], BY_NAME[name].reference()


def ours(model: CausalLM, prompt: list[int], settings: dict[str, Any], seed: int, count: int) -> list[int]:
    params = SamplingParams(**settings, seed=seed)
    return [step[0].choice.token_id for step in generate(model, [prompt], [Sampler(params)], Limits(count))]


def theirs(
    model: transformers.PreTrainedModel, prompt: list[int], settings: dict[str, Any], seed: int, count: int
) -> list[int]:
    torch.manual_seed(seed)
    wanted = {name: value for name, value in settings.items() if value}
    out = model.generate(
        torch.tensor([prompt]), do_sample=True, max_new_tokens=count, pad_token_id=0, **{"top_k": 0, **wanted}
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("settings", MATRIX, ids=lambda settings: " ".join(f"{v}" for v in settings.values()))
def test_ids_are_transformers_for_crossed_settings(pair, settings):
    for seed in SEEDS:
        prompt = [seed % 90, 5, 5, 17, 5]
        assert ours(pair[0], prompt, settings, seed, 10) == theirs(pair[1], prompt, settings, seed, 10)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, transformers.PreTrainedModel]:
    """A tiny model whose vocabulary is as large as a Qwen2.5's."""
    folder = tmp_path_factory.mktemp("wide")
    reference = Family("wide", "Qwen2", {"vocab_size": 151_936, "num_key_value_heads": 2}).save(folder)
    return load_model(folder)[0], reference


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        {"temperature": 1.5, "min_p": 0.02},
    ],
    ids=str,
)
def test_ids_are_transformers_over_a_vocabulary_of_151936(wide, settings):
    for seed in (0, 42):
        prompt = [150_000, 7, 99_999]
        assert ours(wide[0], prompt, settings, seed, 6) == theirs(wide[1], prompt, settings, seed, 6)
