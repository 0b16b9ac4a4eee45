"""Products that read stored weights: every format, every way through the C code, and the portable fallback."""

import os
import platform
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.model import kernels
from decodescope.model.gguf_blocks import BLOCK_SIZES, unpack_into
from decodescope.model.kernels import Arena, Packed, product, row_bytes, unpack_rows
from decodescope.model.kernels.compiled import MOST_ROWS, Library
from decodescope.model.kernels.packed import FORMATS
from decodescope.model.kernels.products import _by_tiles

VALUES = {name: values for name, (values, _) in BLOCK_SIZES.items()}
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "NF4": [0],
}
DENSE = (torch.float32, torch.bfloat16, torch.float16)
compiled = pytest.mark.skipif(
    kernels.available().instructions is None, reason="needs a C compiler; ends where there is one"
)


def random_packed(block_format: str, rows: int, blocks: int, seed: int = 0) -> Packed:
    """Any bits, but the float16 scales and minima in a sane range."""
    generator = np.random.default_rng(seed)
    width = row_bytes(block_format, VALUES[block_format])
    raw = generator.integers(0, 256, (rows, blocks, width), np.uint8)
    for at in HALVES[block_format]:
        halves = generator.uniform(-0.02, 0.02, (rows, blocks)).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8).reshape(rows, blocks, 2)
    return Packed(block_format, torch.from_numpy(raw.reshape(rows, -1)))


def unpacked(weight: Packed) -> Tensor:
    out = torch.empty(weight.shape)
    unpack_into(out, weight.blocks.view(-1), weight.format)
    return out


def activations(rows: int, columns: int) -> Tensor:
    """Every row with a few outliers, as the model's own."""
    x = torch.randn(rows, columns)
    x[:, ::37] *= 300
    return x


def assert_product(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within float32 rounding of the exact product: relative to the norms of the two rows."""
    exact = x.double() @ weight.double().T
    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert ((found - exact).abs() <= 4e-7 * norms).all()


def test_each_way_through_is_compiled(library: Library, request: pytest.FixtureRequest):
    ways = ["AMX", "AVX-512 VNNI", "AVX-512", "AVX2", "C"]
    first = {"native": 0, "digits": 1, "lanes": 2, "avx2": 3, "plain": 4}[request.node.callspec.params["library"]]
    assert library.instructions in (ways[first:] if first < 3 else ways[first : first + 1])


@pytest.mark.parametrize("block_format", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), blocks=st.integers(1, 13), inputs=st.integers(1, 35), seed=st.integers(0, 9))
def test_a_packed_product_is_the_dense_one_within_rounding(library, block_format, rows, blocks, inputs, seed):
    weight = random_packed(block_format, rows, blocks, seed)
    x = activations(inputs, weight.shape[1])
    assert_product(library.products(x, (weight,), (None,)), x, unpacked(weight))


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), columns=st.integers(1, 200), inputs=st.integers(1, 17))
def test_a_product_with_16_bit_numbers_is_the_dense_one_within_rounding(library, dtype, rows, columns, inputs):
    weight, x = torch.randn(rows, columns).to(dtype), activations(inputs, columns)
    assert_product(library.products(x, (weight,), (None,)), x, weight.float())


@pytest.mark.parametrize("inputs", [1, 4, 8, 33])
def test_matrices_of_one_call_are_each_its_own_product(library, inputs):
    held = [random_packed("Q5_0", 37, 7), random_packed("NF4", 5, 4), random_packed("Q8_0", 17, 7)]
    held = [Packed(each.format, each.blocks[:, : row_bytes(each.format, 192)].contiguous()) for each in held]
    x, weights = activations(inputs, 192), [*held, torch.randn(19, 192).bfloat16()]
    biases = [None, torch.randn(5), torch.randn(17).bfloat16(), None]
    found = library.products(x, weights, biases).split([weight.shape[0] for weight in weights], dim=1)
    for part, weight, bias in zip(found, weights, biases, strict=True):
        dense = unpacked(weight) if isinstance(weight, Packed) else weight.float()
        assert_product(part - (0 if bias is None else bias.float()), x, dense)


@pytest.mark.parametrize("block_format", FORMATS)
def test_rows_are_unpacked_bit_by_bit(library, block_format):
    """Random scales are infinities, NaN and subnormals too."""
    width = row_bytes(block_format, 512)
    weight = Packed(
        block_format, torch.from_numpy(np.random.default_rng(3).integers(0, 256, (400, width), np.uint8))
    )
    expected = unpacked(weight)
    assert not expected.isfinite().all()
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        out = torch.empty(399, 512, dtype=dtype)
        library.unpack(weight, 1, out)
        nan = expected[1:].isnan()
        assert torch.equal(out.isnan(), nan)
        assert torch.equal(out[~nan].view(bits), expected[1:].to(dtype)[~nan].view(bits))


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0x0001, 0x7BFF, 0x8000], ids=hex)
def test_extreme_scales_come_through_as_in_the_unpacked_form(library, block_format, half):
    weight = random_packed(block_format, 3, 6)
    for at in HALVES[block_format]:
        weight.blocks[1, at], weight.blocks[1, at + 1] = half & 255, half >> 8
    x = activations(7, weight.shape[1])
    dense, found = unpacked(weight), library.products(x, (weight,), (None,))
    expected = x @ dense.T
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    finite = dense.isfinite().all(dim=1)
    assert_product(found[:, finite], x, dense[finite])


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e34, 1e-42, 0.0])
def test_extreme_activations_come_through_as_in_the_dense_product(library, block_format, value):
    weight = random_packed(block_format, 5, 4)
    x = activations(7, weight.shape[1])
    x[1, 40 % x.shape[1]] = value
    dense, found = unpacked(weight), library.products(x, (weight,), (None,))
    assert torch.equal(found.isfinite(), (x @ dense.T).isfinite())
    finite = x.isfinite().all(dim=1)
    assert_product(found[finite], x[finite], dense)


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_a_group_of_equal_largest_values_keeps_its_digits(library, rows):
    """All 32 at the end of the fixed point's range, both signs: no digit may run over."""
    weight = random_packed("Q8_0", 4, 8)
    for largest in torch.logspace(-20, 20, 400).tolist():
        x = torch.full((rows, 256), largest)
        x[:, ::3] = -largest
        assert_product(library.products(x, (weight,), (None,)), x, unpacked(weight))


@compiled
@pytest.mark.parametrize("rows", [1, 5, 8, MOST_ROWS, MOST_ROWS + 1, 40, 513])
@pytest.mark.parametrize("block_format", FORMATS)
def test_many_rows_and_few_give_the_same_numbers(block_format, rows):
    weight, dense = random_packed(block_format, 21, 3), None
    dense = unpacked(weight)
    x = activations(rows, weight.shape[1])
    assert_product(product(x, weight), x, dense)
    assert_product(_by_tiles(x, weight), x, dense)


def test_activations_may_have_any_layout_batch_and_dtype():
    weight = random_packed("Q5_0", 9, 4)
    wide = torch.randn(128, 2, 3, dtype=torch.float64)
    x = wide.permute(1, 2, 0)
    found = product(x, weight)
    assert found.shape == (2, 3, 9)
    assert_product(found.view(6, 9), x.reshape(6, 128).float(), unpacked(weight))
    assert product(x[:0], weight).shape == (0, 3, 9)


def test_a_weight_that_the_kernels_do_not_know_is_multiplied_all_the_same():
    x, weight = torch.randn(2, 24), torch.randn(24, 10, dtype=torch.float64)
    assert_product(product(x, weight.T), x, weight.T.float())
    assert torch.equal(product(torch.ones(2, 0), torch.ones(3, 0)), torch.zeros(2, 3))


def test_widths_that_differ_are_refused():
    with pytest.raises(ValueError, match="31 activations against rows of 32"):
        product(torch.ones(1, 31), random_packed("Q8_0", 2, 1))


@pytest.mark.parametrize(
    ("block_format", "blocks"),
    [("Q8_0", torch.zeros(2, 35, dtype=torch.uint8)), ("F16", torch.zeros(2, 34, dtype=torch.uint8)),
     ("Q8_0", torch.zeros(2, 34)), ("Q8_0", torch.zeros(34, 4, dtype=torch.uint8).T[:, :34])],
    ids=["half a block", "no blocks", "no bytes", "scattered"],
)  # fmt: skip
def test_bytes_that_are_no_rows_of_blocks_are_refused(block_format, blocks):
    with pytest.raises(ValueError, match="no contiguous rows"):
        Packed(block_format, blocks)


def test_a_row_of_half_a_block_has_no_packed_size():
    assert row_bytes("Q4_K", 512) == 288
    assert row_bytes("Q4_K", 128) is None
    assert row_bytes("IQ1_S", 256) is None


def test_rows_can_be_unpacked_to_any_float():
    weight = random_packed("Q6_K", 6, 2)
    for dtype in (*DENSE, torch.float64):
        assert torch.equal(unpack_rows(weight, 2, 99, dtype), unpacked(weight)[2:].to(dtype))


@compiled
def test_products_from_several_threads_do_not_mix():
    weight = random_packed("Q4_0", 3000, 28)
    dense, wrong = unpacked(weight), []

    def work(seed: int) -> None:
        for turn in range(20):
            rows = 1 + turn % 2 * 7
            x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed * 100 + turn))
            if (product(x, weight) - x @ dense.T).abs().max() > 1e-3:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@compiled
@pytest.mark.parametrize("rows", [3, 8, 40])
def test_any_number_of_threads_gives_the_same_bits(rows):
    weight, x, before = random_packed("Q6_K", 2000, 4), torch.randn(rows, 1024), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            found.append(product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@compiled
def test_threads_that_have_ended_keep_nothing():
    """What 512 rows are laid out in takes 8 MB, where there are tiles."""
    weight, x, taken = random_packed("Q8_0", 16, 152), activations(512, 4864), []
    for _ in range(16):
        thread = threading.Thread(target=product, args=(x, weight))
        thread.start()
        thread.join()
        taken.append(psutil.Process().memory_info().rss)
    assert taken[-1] - taken[3] < 48 << 20


SEPARATE = """
import os, sys, torch
from decodescope.model.kernels import Packed, available, product, unpack_rows
weight, x = torch.randn(4000, 256).bfloat16(), torch.randn(2, 256)
packed = Packed("Q8_0", torch.randint(0, 48, (4000, 272), dtype=torch.uint8))
dense, many = unpack_rows(packed, 0, 4000, torch.float32), torch.randn(9, 256)
def right():
    few = torch.allclose(product(x, weight), x @ weight.float().T, rtol=1e-3, atol=1e-3)
    return few and torch.allclose(product(many, packed), many @ dense.T, rtol=1e-3, atol=1e-3)
torch.set_num_threads(2)
fine = all(right() for _ in range(50))
"""


def separately(script: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SEPARATE + script], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment}, check=True,
    )  # fmt: skip
    return run.stdout.strip()


@compiled
def test_a_forked_process_works_on_without_the_helpers():
    script = """
expected = product(x, weight).tolist()
child = os.fork()
if child == 0:
    os._exit(0 if all(product(x, weight).tolist() == expected for _ in range(9)) else 1)
print(fine, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), right())
"""
    assert separately(script) == "True 0 True"


def test_without_a_compiler_products_are_the_same_and_the_report_says_why(tmp_path):
    script = "print(fine, available().instructions, available().reason)"
    assert separately(script, PATH="", DECODESCOPE_CACHE=str(tmp_path)) == "True None no_compiler"


def test_tensors_of_an_arena_are_apart_aligned_and_outlive_it():
    arena = Arena(piece_bytes=1 << 20)
    taken = [arena.take((rows, 33), dtype) for rows in (1, 7, 9000) for dtype in (*DENSE, torch.uint8)]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    del arena
    for number, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        assert (tensor == number).all()


FAULTS = """
import resource, sys, torch
from decodescope.model.kernels import keep_freed_blocks
if sys.argv[1] == "kept":
    keep_freed_blocks()
def layer():
    [torch.zeros(5 << 20, dtype=torch.uint8) for _ in range(6)]
layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc learns from what is freed; runs there")
def test_freed_blocks_are_used_again_instead_of_handed_back():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "handed back")
    }
    assert faults["kept"] < 5000 < faults["handed back"]
