"""Unpacking GGUF blocks: every bit as the gguf package's own numpy code, for every type that it knows."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from decodescope.formats.gguf import BLOCK_TYPES
from decodescope.model import gguf_blocks
from decodescope.model.gguf_blocks import unpack_into

TYPES = {name: (values, width) for name, values, width in BLOCK_TYPES.values()}
WRITTEN_OUT = sorted(gguf_blocks._UNPACK)
BY_PACKAGE = sorted(TYPES.keys() - gguf_blocks._UNPACK.keys())


def random_blocks(block_type: str, count: int) -> np.ndarray:
    """Random bytes; among them blocks of zeros and ones, and blocks of infinities, NaN and tiny halves throughout."""
    width = TYPES[block_type][1]
    blocks = np.random.default_rng(width).integers(0, 256, (count, width), np.uint8)
    for row, half in enumerate((0x0000, 0xFFFF, 0x7C00, 0xFC00, 0x7E00, 0x0001, 0x8000, 0x7BFF)):
        blocks[row::37] = np.resize(np.array([half & 255, half >> 8], np.uint8), width)
    return blocks


def reference(blocks: np.ndarray, block_type: str) -> Tensor:
    with np.errstate(all="ignore"):
        values = quants.dequantize(blocks, gguf.GGMLQuantizationType[block_type])
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).flatten()


def unpacked(blocks: np.ndarray, block_type: str, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((blocks.shape[0] * TYPES[block_type][0],), 7.0, dtype=dtype)
    unpack_into(out, torch.from_numpy(blocks), block_type)
    return out


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Bits equal, the sign of zero included; NaN stands where NaN stands."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    integers = {4: torch.int32, 2: torch.int16}[found.element_size()]
    assert torch.equal(found[~nan].view(integers), expected[~nan].view(integers))


def test_the_rare_types_are_the_packages_and_the_common_ones_written_out():
    assert {"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16"} <= set(WRITTEN_OUT)
    assert {"IQ2_XXS", "Q2_K", "TQ1_0", "MXFP4"} <= set(BY_PACKAGE)


@pytest.mark.parametrize("block_type", sorted(TYPES))
def test_every_type_is_unpacked_bit_by_bit_as_the_gguf_package_does(block_type):
    blocks = random_blocks(block_type, 150)
    expected = reference(blocks, block_type)
    assert expected.isnan().any() or block_type in ("MXFP4", "NVFP4")  # the hard cases are in there
    assert_bits(unpacked(blocks, block_type), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_type", sorted(TYPES))
def test_a_16_bit_target_is_the_float32_value_rounded_once(block_type, dtype):
    blocks = random_blocks(block_type, 80)
    assert_bits(unpacked(blocks, block_type, dtype), reference(blocks, block_type).to(dtype))


@pytest.mark.parametrize("block_type", sorted(TYPES))
def test_the_chunks_border_shows_nowhere(block_type, monkeypatch):
    blocks = random_blocks(block_type, 41)
    whole = unpacked(blocks, block_type)
    for values in (1, 3 * TYPES[block_type][0], 40 * TYPES[block_type][0]):
        monkeypatch.setattr(gguf_blocks, "_CHUNK_VALUES", values)
        assert_bits(unpacked(blocks, block_type), whole)


@pytest.mark.parametrize("block_type", ["Q4_0", "Q6_K", "BF16"])
def test_the_real_chunk_size_ends_in_the_right_place(block_type):
    count = gguf_blocks._CHUNK_VALUES // TYPES[block_type][0] + 1
    blocks = random_blocks(block_type, count)
    assert_bits(unpacked(blocks, block_type), reference(blocks, block_type))


def test_nf4_is_each_values_level_times_the_blocks_largest_magnitude():
    blocks = np.random.default_rng(5).integers(0, 256, (60, 34), np.uint8)
    blocks[0, :2] = (0x00, 0x7C)  # infinity: its zeros are NaN
    found = torch.empty(60 * 64)
    unpack_into(found, torch.from_numpy(blocks), "NF4")
    largest = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    levels = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    with np.errstate(all="ignore"):
        expected = gguf_blocks.NF4_LEVELS.numpy()[levels] * largest
    assert_bits(found, torch.from_numpy(expected).flatten())


def test_nf4s_levels_are_even_quantiles_of_the_normal_distribution():
    """Eight from -1 to 0 and nine from 0 to 1, zero once: QLoRA's construction, its offset of 0.9677083."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64))[:-1]
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64))[:-1]
    levels = torch.cat((below, torch.zeros(1, dtype=torch.float64), above.flip(0)))
    assert torch.allclose((levels / levels.max()).float(), gguf_blocks.NF4_LEVELS, atol=2e-7)


def test_the_comparison_sees_one_wrong_bit():
    blocks = random_blocks("Q4_K", 150)
    found = unpacked(blocks, "Q4_K")
    at = int(found.isfinite().nonzero()[5])
    found.view(torch.int32)[at] ^= 1
    with pytest.raises(AssertionError):
        assert_bits(found, reference(blocks, "Q4_K"))
