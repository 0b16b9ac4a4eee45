"""Costs computed from the configuration alone are those of real files, models and caches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_checkpoints import write_gguf

from decodescope.formats.gguf import BLOCK_TYPES
from decodescope.model.checkpoint import load_model
from decodescope.model.config import read_config
from decodescope.model.cost import BITS, CACHE_DTYPES, count_parameters, fit, kv_bytes_per_token, weight_bytes
from decodescope.model.kv_cache import KVCache
from decodescope.model.weights import open_weights
from families import Family

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SEVEN = read_config(CONFIGS / "qwen2.5-7b-instruct.config.json")
HALF = read_config(CONFIGS / "qwen2.5-0.5b-instruct.config.json")


def test_the_parts_of_qwen_2_5_7b_by_hand():
    parts = count_parameters(SEVEN)
    assert parts.embedding == parts.head == 152_064 * 3584
    assert parts.norms == (2 * 28 + 1) * 3584
    assert parts.attention == 28 * (2 * 3584 * 3584 + 3584 + 2 * (512 * 3584 + 512))
    assert parts.mlp == 28 * 3 * 3584 * 18_944
    assert parts.total == parts.embedding + parts.head + parts.non_embedding


def test_a_tied_head_counts_once():
    assert count_parameters(HALF).head == 0
    untied = count_parameters(replace(HALF, tie_word_embeddings=False))
    assert untied.total - count_parameters(HALF).total == 151_936 * 896


def test_head_norms_count_as_norms(tiny_folders):
    config = read_config(tiny_folders["qwen3-gqa"] / "config.json")
    assert count_parameters(config).norms == 32 * 7 + 3 * 2 * 16


def test_bits_are_those_of_the_block_table():
    blocks = {name: 8 * width / values for name, values, width in BLOCK_TYPES.values()}
    for name, bits in BITS.items():
        assert bits == (blocks[name] if name in blocks else getattr(torch, name).itemsize * 8), name
    assert all(width == getattr(torch, name).itemsize for name, width in CACHE_DTYPES.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_of_the_loaded_model(family, tiny_folders, dtype):
    model, _ = load_model(tiny_folders[family.name], dtype)
    loaded = sum(p.numel() * p.element_size() for p in model.parameters())  # a tied matrix is listed once
    assert weight_bytes(model.config)[dtype] == loaded


def test_block_format_bytes_are_those_of_a_gguf_file(tmp_path):
    whole_blocks = Family("blocks", "Qwen2", dict(num_key_value_heads=2, intermediate_size=64)).reference()
    weights = open_weights(write_gguf(tmp_path / "m.gguf", whole_blocks, "Qwen2", kind="Q8_0"))
    assert weight_bytes(weights.config)["Q8_0"] == sum(weights.stored_bytes().values())


def test_cache_bytes_are_those_of_a_real_cache(family, tiny_folders):
    model, _ = load_model(tiny_folders[family.name], "bfloat16")
    cache = KVCache(3)
    model(torch.arange(11)[None], cache)
    assert cache.used_bytes == 11 * kv_bytes_per_token(model.config, 2)


def test_grouped_heads_save_a_factor_of_seven():
    full = replace(SEVEN, num_key_value_heads=28)
    assert kv_bytes_per_token(full, 2) == 7 * kv_bytes_per_token(SEVEN, 2)


def test_what_fits_is_decided_to_the_byte():
    size = weight_bytes(SEVEN)["bfloat16"]
    just, short = (fit(SEVEN, 1 << 40, size - less)["dtypes"]["bfloat16"] for less in (0, 1))
    assert just == {"weights_fit": True, "tokens_left": 0}
    assert short == {"weights_fit": False, "tokens_left": 0}
    beside = fit(SEVEN, 1 << 40, size + 10 * 57_344 + 57_343)["dtypes"]["bfloat16"]
    assert beside == {"weights_fit": True, "tokens_left": 10}


def test_no_more_tokens_than_the_context_are_promised():
    result = fit(SEVEN, 1 << 42, 1 << 41)
    assert {row["tokens_left"] for row in result["dtypes"].values()} == {32_768}
    assert (result["kind"], result["memory_total_bytes"]) == ("estimated", 1 << 42)
    assert result["dtypes"].keys() == {"float32", "bfloat16", "float16"}
