"""Rotary positions: frequencies equal to transformers', and the two laws that make them work."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decodescope.model.rope import RopeConfig, inverse_frequencies, rotary_table, rotate


def theirs(head_dim: int, theta: float, kind: str, values: dict[str, Any]) -> tuple[torch.Tensor, float]:
    parameters = {"rope_type": kind, "rope_theta": theta, **values}
    config = LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=2048,
        rope_parameters=parameters,
    )  # fmt: skip
    rule = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    return rule(config)


def ours(head_dim: int, theta: float, kind: str, values: dict[str, Any]) -> tuple[torch.Tensor, float]:
    keys = {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}, "max_position_embeddings": 2048}
    return inverse_frequencies(RopeConfig.parse(keys), head_dim)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    ("linear", {"factor": 0.5}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64}),
    ("llama3", {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5}),
    ("llama3", {name: LLAMA3[name] for name in LLAMA3 if name != "original_max_position_embeddings"}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ("yarn", {"factor": 40.0}),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 512}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25}),
    ("yarn", {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707}),
    ("yarn", {"factor": 2.0, "original_max_position_embeddings": 8}),
]


@pytest.mark.parametrize("head_dim", [2, 8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize(("kind", "values"), SETTINGS, ids=str)
def test_frequencies_equal_transformers(kind, values, theta, head_dim):
    expected, expected_factor = theirs(head_dim, theta, kind, values)
    found, factor = ours(head_dim, theta, kind, values)
    assert found.dtype == torch.float32
    # Two units in the last place: the same equation in another order of products.
    torch.testing.assert_close(found, expected, rtol=2.5e-7, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_the_comparison_sees_a_shifted_exponent_and_a_missing_scaling():
    expected, _ = theirs(64, 10_000.0, "llama3", LLAMA3)
    for wrong in (ours(64, 10_001.0, "llama3", LLAMA3)[0], ours(64, 10_000.0, "default", {})[0]):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, expected, rtol=2.5e-7, atol=0)


def test_the_divisors_of_a_gguf_file_divide_the_frequencies():
    divisors = (1.0, 2.0, 8.0, 32.0)
    plain, _ = inverse_frequencies(RopeConfig(theta=500_000.0), 8)
    divided, factor = inverse_frequencies(RopeConfig(theta=500_000.0, divisors=divisors), 8)
    assert torch.equal(divided * torch.tensor(divisors), plain)
    assert factor == 1.0
    linear = RopeConfig(theta=500_000.0, kind="linear", factor=4.0, divisors=divisors)
    assert torch.equal(inverse_frequencies(linear, 8)[0] * 4, divided)


def test_divisors_as_llama_cpp_writes_them_give_the_llama3_frequencies():
    plain, _ = ours(128, 500_000.0, "default", {})
    expected, _ = ours(128, 500_000.0, "llama3", LLAMA3)
    divisors = tuple((plain / expected).tolist())
    found, _ = inverse_frequencies(RopeConfig(theta=500_000.0, divisors=divisors), 128)
    torch.testing.assert_close(found, expected, rtol=2.5e-7, atol=0)


def turned(x: torch.Tensor, position: int, kind: str = "default", **values: Any) -> torch.Tensor:
    """x [d] at a position, in float64."""
    frequencies, factor = ours(x.numel(), 10_000.0, kind, values)
    table = rotary_table(frequencies, torch.tensor([[position]]), factor, torch.float64)
    return rotate(x[None, None, None], table).view(-1)


positions = st.integers(0, 4000)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(positions, positions, st.integers(0, 4000), st.sampled_from([2, 8, 64]))
def test_the_score_depends_on_the_distance_alone(m, n, shift, size):
    random = torch.Generator().manual_seed(size)
    q, k = torch.randn(2, size, dtype=torch.float64, generator=random)
    here = turned(q, m) @ turned(k, n)
    there = turned(q, m + shift) @ turned(k, n + shift)
    # Angles are float32 as in transformers: at position 8,000 one is off by up to 2.4e-4 radian.
    assert abs(here - there) < 5e-4 * float(q.norm() * k.norm())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(positions, st.sampled_from([2, 8, 64]))
def test_turning_keeps_the_length_and_position_0_turns_nothing(position, size):
    x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    # Cosine and sine are rounded to float32 before they are widened.
    assert float(turned(x, position).norm()) == pytest.approx(float(x.norm()), rel=2e-7)
    assert torch.equal(turned(x, 0), x)


def test_yarns_factor_lengthens_what_is_turned():
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    long = turned(x, 9, "yarn", factor=4.0, original_max_position_embeddings=512)
    assert float(long.norm() / x.norm()) == pytest.approx(0.1 * math.log(4) + 1, rel=2e-7)


def test_each_pair_turns_by_its_own_angle():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)  # pairs (0, 2) and (1, 3)
    expected = [math.cos(3), -math.sin(0.03), math.sin(3), math.cos(0.03)]
    assert turned(x, 3).tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tables_and_rotation_equal_transformers_bit_by_bit(dtype):
    random = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, 40, 16, generator=random).to(dtype) for heads in (4, 2))
    places = torch.randint(0, 30_000, (2, 40), generator=random)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16)
    cos, sin = LlamaRotaryEmbedding(config)(q, places)
    frequencies, factor = ours(16, 10_000.0, "default", {})
    table = rotary_table(frequencies, places, factor, dtype)
    assert table[0].dtype == dtype and table[0].shape == (2, 1, 40, 16)
    assert torch.equal(table[0][:, 0], cos) and torch.equal(table[1][:, 0], sin)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(rotate(q, table), expected[0]) and torch.equal(rotate(k, table), expected[1])
