"""How far every precision is from float32 on the small starter: measured as `benchmarks/accuracy.py` measures it,
and held to bounds that rounding keeps and a broken kernel does not.

Measured on 180 tokens (mean KL, nats): as stored 2e-11, float16 3e-6, bfloat16 2e-3, int4 0.28 and nf4 0.36 (on top
of the file's own 4 bits; a small model suffers most); caches of float16 3e-5, int8 1e-3, float8 6e-3.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import Packed
from decodescope.model.linear import Matrix
from decodescope.model.quantize import pack
from decodescope.open_model import OpenModel
from repository import ROOT

Texts = list[list[int]]
BOUNDS_NATS = {"as stored": 1e-8, "float16": 5e-5, "bfloat16": 1e-2, "int4": 0.7, "nf4": 0.9}
CACHE_BOUNDS_NATS = {"float32 cache": 5e-4, "float16 cache": 5e-4, "int8 cache": 1e-2, "float8 cache": 5e-2}


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import accuracy
    finally:
        sys.path.pop(0)
    return accuracy


@pytest.fixture(scope="module")
def reference(small_path: Path) -> OpenModel:
    return OpenModel.open(str(small_path), dtype="float32")


@pytest.fixture(scope="module")
def texts(accuracy: ModuleType, reference: OpenModel) -> Texts:
    return accuracy.passages(reference, None, 8)[::3]


def test_the_measures_are_those_of_the_definition(accuracy):
    expected, found = (
        torch.tensor([[0.0, 0.0], [2.0, 0.0]]).log_softmax(-1),
        torch.tensor([[0.0, 0.0], [0.0, 1.0]]),
    )
    tally = accuracy.Tally()
    tally.add(expected, found)
    row = tally.row("one", "whole", torch.nn.Linear(1, 1))
    p, q = expected[1].exp().double(), found[1].double().softmax(-1)
    kl = float((p * (p / q).log()).sum())
    assert (row.kl_mean_nats, row.kl_max_nats) == (pytest.approx(kl / 2), pytest.approx(kl))
    assert (row.tokens, row.top1_agreement) == (2, 0.5)


@pytest.mark.parametrize("name", BOUNDS_NATS)
def test_a_precision_is_as_close_to_float32_as_its_rounding(accuracy, reference, texts, name):
    whole, by_token = accuracy.precisions(reference, [name], texts)
    assert (whole.read, by_token.read) == ("whole", "by token")
    for row in (whole, by_token):
        assert 0 <= row.kl_mean_nats < BOUNDS_NATS[name] and row.tokens == sum(map(len, texts))
    # Both ways compute with the same numbers.
    assert abs(whole.kl_mean_nats - by_token.kl_mean_nats) <= 0.5 * whole.kl_mean_nats + 1e-8
    if name != "as stored":
        assert whole.kl_mean_nats > BOUNDS_NATS[name] / 1000  # it does round


def changed(model: CausalLM, change: Callable[[str, Matrix], torch.Tensor | Packed]) -> CausalLM:
    for name, matrix in model.named_modules():
        if isinstance(matrix, Matrix):
            matrix.hold(change(f"{name}.weight", matrix))
    return model


def test_eight_bits_made_of_sixteen_are_close_to_float32(accuracy, reference, small_path, texts):
    def take(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    model = OpenModel.open(str(small_path), dtype="float16").model
    model = changed(model, lambda name, matrix: pack(matrix.weight.data, "int8", name, take))
    assert {matrix.stored_as for matrix in model.modules() if isinstance(matrix, Matrix)} == {"Q8_0"}
    for row in accuracy.measured(reference.model, model, "int8", texts):
        assert 1e-6 < row.kl_mean_nats < 2e-2 and row.top1_agreement > 0.9


def test_a_kernel_that_reads_nibbles_the_wrong_way_round_is_beyond_every_bound(
    accuracy, reference, small_path, texts
):
    def swapped(name: str, matrix: Matrix) -> torch.Tensor | Packed:
        held = matrix.in_memory
        if not isinstance(held, Packed) or held.format != "Q4_1":
            return held
        blocks = held.blocks.view(-1, 20).clone()  # scale, minimum, 16 bytes of two quants each
        blocks[:, 4:] = blocks[:, 4:] << 4 | blocks[:, 4:] >> 4
        return Packed(held.format, blocks.view_as(held.blocks))

    broken = changed(OpenModel.open(str(small_path)).model, swapped)
    for row in accuracy.measured(reference.model, broken, "broken", texts):
        assert row.kl_mean_nats > 2 * max(BOUNDS_NATS.values())


def test_a_cache_of_fewer_bits_is_as_close_to_one_of_sixteen_as_its_rounding(accuracy, small_path, texts):
    rows = list(accuracy.caches(OpenModel.open(str(small_path)).model, texts))
    assert {row.name for row in rows} == set(CACHE_BOUNDS_NATS)
    for row in rows:
        assert CACHE_BOUNDS_NATS[row.name] / 1000 < row.kl_mean_nats < CACHE_BOUNDS_NATS[row.name]


def test_the_table_has_a_line_for_each_row(accuracy):
    row = accuracy.Row("int8", "whole", 1_500_000_000, 10, 1e-3, 2e-3, 0.5, 0.95)
    assert accuracy.table([row], "held in").splitlines()[2] == (
        "| int8 | whole | 1.50 GB | 1.0e-03 | 2.0e-03 | 5.0e-01 | 95.0 % |"
    )
