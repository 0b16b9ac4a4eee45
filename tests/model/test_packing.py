"""Numbers into blocks: bit by bit as others do it, within the error each format allows, the same on every machine."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.model.gguf_blocks import BLOCK_SIZES, NF4_LEVELS
from decodescope.model.kernels import Packed, packing, row_bytes, unpack_rows
from decodescope.model.kernels.packing import HALF_LARGEST, pack_into

FORMATS = ("Q8_0", "Q4_0", "Q4_K", "NF4")
VALUES = {name: BLOCK_SIZES[name][0] for name in FORMATS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error of a value as a share of its block's largest magnitude, with the rounding of the scales. Q8_0: half a
# step of 1/127; NF4: half the widest gap between levels. Q4_0 and Q4_K: root of the mean square; -8..7 misses the far
# end by a step of 1/8; a step of Q4_K is 2/15, and its scales and minima miss by half of 1/63 of the largest.
BOUNDS = {"Q8_0": 0.5 / 127 + 5e-4, "NF4": 0.152 + 5e-4, "Q4_0": 0.126, "Q4_K": 0.095}
SMALLEST = 2.0**-24  # float16

seeds = st.integers(0, 2**32 - 1)
unhurried = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def empty(block_format: str, rows: Tensor) -> Packed:
    width = row_bytes(block_format, rows.shape[1])
    assert width
    return Packed(block_format, torch.zeros(rows.shape[0], width, dtype=torch.uint8))


def packed(block_format: str, rows: Tensor) -> Packed:
    out = empty(block_format, rows)
    assert pack_into(out, rows)
    return out


def unpacked(weight: Packed) -> Tensor:
    return unpack_rows(weight, 0, weight.shape[0], torch.float32)


def numbers(seed: int, rows: int, columns: int, kind: str = "normal") -> Tensor:
    """Rows like those of a model; `wild` ones differ by orders of magnitude, block by block and value by value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 0.03
    if kind == "wild":
        x *= 10 ** (torch.rand(rows, columns // 32, generator=generator) * 8 - 5).repeat_interleave(32, dim=1)
        x *= 10 ** (torch.randint(0, 40, x.shape, generator=generator) == 0)
    if kind == "lopsided":
        x = x.abs() - 0.01
    if kind == "coarse":
        x = torch.round(x * 100) / 100
    return x.clamp(-HALF_LARGEST, HALF_LARGEST)


kinds = st.sampled_from(["normal", "wild", "lopsided", "coarse"])


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(packing, "library", lambda: None)


def portable(block_format: str, rows: Tensor) -> Packed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "library", lambda: None)
        return packed(block_format, rows)


@pytest.mark.full
@pytest.mark.parametrize("block_format", FORMATS)
@unhurried
@given(seed=seeds, rows=st.integers(1, 5), blocks=st.integers(1, 4), dtype=st.sampled_from(DTYPES), kind=kinds)
def test_every_way_through_the_c_code_gives_the_bits_of_torch(
    library, block_format, seed, rows, blocks, dtype, kind
):
    x = numbers(seed, rows, blocks * VALUES[block_format], kind).to(dtype)
    found = empty(block_format, x)
    assert library.pack(x, found)
    assert torch.equal(found.blocks, portable(block_format, x).blocks)


@pytest.mark.parametrize("block_format", FORMATS)
@unhurried
@given(seed=seeds, rows=st.integers(1, 5), blocks=st.integers(1, 4), dtype=st.sampled_from(DTYPES), kind=kinds)
def test_with_and_without_a_compiler_the_bits_are_the_same(block_format, seed, rows, blocks, dtype, kind):
    x = numbers(seed, rows, blocks * VALUES[block_format], kind).to(dtype)
    assert torch.equal(packed(block_format, x).blocks, portable(block_format, x).blocks)


def by_package(block_format: str, x: Tensor) -> np.ndarray:
    return quants.quantize(x.numpy(), gguf.GGMLQuantizationType[block_format])


@unhurried
@given(seed=seeds, rows=st.integers(1, 4), blocks=st.integers(1, 9), kind=kinds)
def test_eight_bits_are_those_of_the_gguf_package(seed, rows, blocks, kind):
    x = numbers(seed, rows, blocks * 32, kind)
    assert np.array_equal(packed("Q8_0", x).blocks.numpy(), by_package("Q8_0", x))


def test_eight_bits_round_ties_away_from_zero_as_the_gguf_package_does():
    x = torch.arange(-16, 16).float() / 2
    x[0] = 127
    found = packed("Q8_0", x[None]).blocks
    assert found[0, 2:].view(torch.int8).tolist()[1:6] == [-8, -7, -7, -6, -6]
    assert np.array_equal(found.numpy(), by_package("Q8_0", x[None]))


@pytest.mark.parametrize("block_format", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("kind", ["normal", "wild", "lopsided"])
def test_the_gguf_package_reads_the_blocks_as_we_do(block_format, kind):
    found = packed(block_format, numbers(3, 16, 512, kind))
    theirs = quants.dequantize(found.blocks.numpy(), gguf.GGMLQuantizationType[block_format])
    assert torch.equal(torch.from_numpy(theirs), unpacked(found))


def block_errors(x: Tensor, y: Tensor, values: int) -> Tensor:
    """Sums of squared errors, block by block."""
    return (x.double() - y.double()).square().view(-1, values).sum(1)


@pytest.mark.parametrize("block_format", FORMATS)
@unhurried
@given(seed=seeds, rows=st.integers(1, 5), blocks=st.integers(1, 4), dtype=st.sampled_from(DTYPES), kind=kinds)
def test_what_comes_back_is_within_the_formats_bound(block_format, seed, rows, blocks, dtype, kind):
    x = numbers(seed, rows, blocks * VALUES[block_format], kind).to(dtype).float()
    off = (unpacked(packed(block_format, x)) - x).double().view(-1, VALUES[block_format])
    largest = x.abs().double().view(-1, VALUES[block_format]).amax(1)
    # A scale below float16's smallest is rounded to it or to zero: so is each of up to 127 steps.
    bound = BOUNDS[block_format] * largest + 127 * SMALLEST
    if block_format in ("Q4_0", "Q4_K"):
        assert (off.square().mean(1).sqrt() <= bound).all()
    else:
        assert (off.abs().amax(1) <= bound).all()


@unhurried
@given(seed=seeds, kind=kinds)
def test_no_block_of_q4_0_is_worse_than_by_its_largest_magnitude(seed, kind):
    x = numbers(seed, 4, 256, kind)
    plain = torch.from_numpy(quants.dequantize(by_package("Q4_0", x), gguf.GGMLQuantizationType.Q4_0))
    ours, theirs = block_errors(x, unpacked(packed("Q4_0", x)), 32), block_errors(x, plain, 32)
    assert (ours <= theirs * (1 + 1e-4) + 1e-6 * block_errors(x, torch.zeros_like(x), 32)).all()


def by_extremes(x: Tensor) -> Tensor:
    """What Q4_K makes of numbers when each group spans its extremes, zero included."""
    groups = x.view(-1, 8, 32)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2)
    scales, minima = (in_six_bits(each) for each in ((high - low) / 15, -low))
    quants = torch.where(scales > 0, (groups + minima) / scales.clamp(min=1e-30), 0).round().clamp(0, 15)
    return (quants * scales - minima).view(x.shape)


def in_six_bits(numbers: Tensor) -> Tensor:
    unit = (numbers.amax(1, keepdim=True) / 63).half().float()
    return torch.where(unit > 0, (numbers / unit).round().clamp(max=63) * unit, 0)[:, :, None]


@unhurried
@given(seed=seeds, kind=kinds)
def test_no_block_of_q4_k_is_worse_than_by_its_extremes(seed, kind):
    x = numbers(seed, 4, 1024, kind)
    ours, plain = block_errors(x, unpacked(packed("Q4_K", x)), 256), block_errors(x, by_extremes(x), 256)
    assert (ours <= plain * (1 + 1e-4) + 1e-6 * block_errors(x, torch.zeros_like(x), 256)).all()


def share(block_format: str, x: Tensor) -> float:
    return float((unpacked(packed(block_format, x)) - x).norm() / x.norm())


def test_errors_of_gaussian_weights_are_the_documented_ones():
    x = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)) * 0.02
    assert share("Q8_0", x) == pytest.approx(0.0054, rel=0.02)
    assert share("Q4_K", x) == pytest.approx(0.0715, rel=0.02)
    assert share("Q4_0", x) == pytest.approx(0.0809, rel=0.02)
    assert share("NF4", x) == pytest.approx(0.0920, rel=0.02)
    plain = torch.from_numpy(quants.dequantize(by_package("Q4_0", x), gguf.GGMLQuantizationType.Q4_0))
    assert share("Q4_0", x) < 0.95 * (plain - x).norm() / x.norm()
    assert share("Q4_K", x) < 0.92 * (by_extremes(x) - x).norm() / x.norm()


@pytest.mark.parametrize("block_format", FORMATS)
def test_zeros_stay_zeros(block_format):
    x = torch.zeros(3, 512)
    x[1, 256:] = torch.linspace(-1, 1, 256)
    found = unpacked(packed(block_format, x))
    assert (found[[0, 2]] == 0).all() and (found[1, :256] == 0).all()
    assert (found[1, 256:] != 0).any()


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("size", [HALF_LARGEST, 1e4, 1e-4, 1e-6, 1e-8, 1e-20, 1e-31, 1e-38, 1e-44])
def test_huge_and_tiny_numbers_stay_finite_and_near(block_format, size):
    x = torch.linspace(-1, 1, 512).roll(100)[None] * size
    with_c, without = packed(block_format, x), portable(block_format, x)
    assert torch.equal(with_c.blocks, without.blocks)
    found = unpacked(with_c)
    assert found.isfinite().all()
    assert (found - x).abs().max() <= 0.16 * size + 127 * SMALLEST


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("value", [5.0, -5.0, 0.1, -0.1])
def test_a_block_of_one_value_comes_back_as_it(block_format, value):
    found = unpacked(packed(block_format, torch.full((2, 512), value)))
    assert torch.allclose(found, torch.full_like(found, value), rtol=2e-3, atol=0)


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("way", [packed, portable])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 65536.0, -1e30])
def test_what_no_scale_can_hold_is_refused(block_format, way, value):
    for at in (0, 300, 511):
        x = torch.ones(3, 512)
        x[1, at] = value
        with pytest.raises(AssertionError):
            way(block_format, x)


@pytest.mark.parametrize("block_format", FORMATS)
def test_any_number_of_threads_gives_the_same_bits(block_format):
    x, before = numbers(1, 300, 1024), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(packed(block_format, x).blocks)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("block_format", FORMATS)
def test_a_chunks_border_shows_nowhere(block_format, without_compiler, monkeypatch):
    x = numbers(2, 7, 1024)
    whole = packed(block_format, x).blocks
    for values in (1, VALUES[block_format] * 3, 1024 * 6 + 1):
        monkeypatch.setattr(packing, "_CHUNK_VALUES", values)
        assert torch.equal(packed(block_format, x).blocks, whole)


@pytest.mark.parametrize("block_format", FORMATS)
def test_rows_may_lie_apart_and_be_wider(block_format):
    wide = numbers(4, 6, 2048).double()
    assert torch.equal(
        packed(block_format, wide[::2, :512]).blocks, packed(block_format, wide.float()[::2, :512].clone()).blocks
    )


def test_rows_of_another_shape_and_formats_that_are_only_read_are_refused():
    with pytest.raises(ValueError, match="into"):
        pack_into(empty("Q8_0", torch.ones(2, 64)), torch.ones(2, 32))
    with pytest.raises(KeyError):
        pack_into(empty("Q6_K", torch.ones(2, 256)), torch.ones(2, 256))


# NF4


def test_nf4_takes_the_nearest_level_and_keeps_each_of_them():
    x = torch.cat((NF4_LEVELS, torch.linspace(-1, 1, 48))) * 3
    found = unpacked(packed("NF4", x[None]))[0]
    assert torch.equal(found[:16], x[:16])
    nearest = (x[:, None] / 3 - NF4_LEVELS).abs().amin(1) * 3
    assert torch.allclose((found - x).abs(), nearest, atol=1e-6)


def bitsandbytes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the levels and the values, as bitsandbytes on the CPU has them."""
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="needs bitsandbytes (extra quant, 43 MB); ends where it is installed"
    )
    codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    levels = torch.stack((codes.view(-1) >> 4, codes.view(-1) & 15), dim=1).view(x.shape)
    return levels, functional.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wild", "lopsided", "coarse"])
def test_nf4_is_that_of_bitsandbytes(dtype, kind):
    """Their largest magnitudes are float32, ours float16: the same number where the weights have 16 bits and no
    magnitude is tiny, else rounded by 2^-11 at most."""
    x = numbers(6, 64, 1024, kind).to(dtype)
    x[:, ::64] += 0.01  # no block of tiny values only
    levels, values = bitsandbytes_of(x)
    found = packed("NF4", x)
    runs = found.blocks.view(-1, 34)[:, 2:]
    assert torch.equal(torch.cat((runs & 15, runs >> 4), dim=1).view(x.shape), levels)
    if dtype == torch.float32:
        assert torch.allclose(unpacked(found), values, rtol=2**-11, atol=0)
    else:
        assert torch.equal(unpacked(found).to(dtype), values)
