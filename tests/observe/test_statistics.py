"""Laws of the statistics: torch's in float64, whatever the values, and however a tensor is cut."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.observe import statistics
from decodescope.observe.statistics import Statistics, measure, measure_seen

NUMBERS = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, math.nan, math.inf, -math.inf]
)
OFFSETS = st.sampled_from([0.0, 1.0, -1e6, 1e30])


def native(tensor: Tensor) -> Tensor:
    """[T, ...] as it lies in a run: [1, ..., T, Y]."""
    if tensor.ndim == 1:
        return tensor[None, :, None]
    return tensor.movedim(0, -2)[None]


def measured(tensors: list[Tensor], start: int) -> list[Statistics]:
    return [Statistics(*line.tolist()) for line in measure([native(tensor) for tensor in tensors], start)]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """[T, ...] of one to three axes, plain noise around an offset with some chosen numbers among it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensor = torch.randn(shape, generator=random) + draw(OFFSETS)
    for number in draw(st.lists(NUMBERS, max_size=4)):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = number
    return tensor.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def by_torch(tensor: Tensor) -> dict[str, float]:
    wide = tensor.double()
    # A deviation from an infinite mean is no number.
    spread = float((wide - wide.mean()).square().sum()) if wide.isfinite().all() else math.nan
    return dict(
        size=wide.numel(), mean=float(wide.mean()), m2=spread, min=float(wide.min()), max=float(wide.max()),
        sum=float(wide.sum()), zeros=int((wide == 0).sum()), nonfinite=int((~wide.isfinite()).sum()),
    )  # fmt: skip


def assert_equal(found: Statistics, expected: dict[str, float], magnitude: float) -> None:
    """Within the noise of float64 sums of numbers of this magnitude."""
    noise = {
        "m2": 1e-13 * magnitude**2,
        "mean": 1e-13 * magnitude,
        "sum": 1e-12 * magnitude,
        "signature": 1e-12 * magnitude,
    }
    for name, value in expected.items():
        close = pytest.approx(value, rel=1e-9, abs=noise.get(name, 0.0), nan_ok=True)
        assert getattr(found, name) == close, (name, found, expected)


def magnitude(tensor: Tensor) -> float:
    finite = tensor.double()[tensor.isfinite()]
    return float(finite.norm()) * 10 if finite.numel() else 0.0


@given(tensors())
@settings(deadline=None)
def test_figures_are_torchs_in_float64(tensor):
    (found,) = measured([tensor], 0)
    assert_equal(found, by_torch(tensor), magnitude(tensor))


@given(tensors(), st.integers(0, 1000), st.data())
@settings(deadline=None, max_examples=200)
def test_any_cutting_into_chunks_gives_the_same_figures(tensor, start, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(tensor) - 1, 1))))) if len(tensor) > 1 else []
    whole = measured([tensor], start)[0]
    joined = None
    for first, last in zip([0, *cuts], [*cuts, len(tensor)], strict=True):
        (part,) = measured([tensor[first:last]], start + first)
        joined = part if joined is None else joined.joined(part)
    assert_equal(joined, whole._asdict(), magnitude(tensor))


@given(tensors(), st.integers(1, 30))
@settings(deadline=None)
def test_a_tensor_too_large_for_one_go_is_measured_the_same(tensor, at_once):
    (whole,) = measured([tensor], 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_AT_ONCE", at_once)
        for part in measured([tensor, tensor], 7):
            assert_equal(part, whole._asdict(), magnitude(tensor))


@given(st.lists(tensors(), min_size=1, max_size=4))
@settings(deadline=None)
def test_tensors_measured_together_are_each_measured_alone(several):
    alike = [each.float().flatten()[:1] for each in several]
    for together, tensor in zip(measured(alike, 3), alike, strict=True):
        assert repr(together) == repr(measured([tensor], 3)[0])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.data())
@settings(deadline=None)
def test_what_may_not_be_seen_counts_nowhere(T, H, S, data):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    values = torch.randn(T, H, S, generator=random)
    seen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=T * S, max_size=T * S))).view(T, 1, S)
    seen[:, :, -1] = True
    plain = values[seen.expand(values.shape)]
    hidden = values.masked_fill(~seen, math.nan)
    assert_equal(measure_seen(native(hidden), native(seen), 0), by_torch(plain), magnitude(plain))
    everything = measure_seen(native(values), native(torch.ones(T, 1, S, dtype=torch.bool)), 5)
    assert_equal(everything, measured([values], 5)[0]._asdict(), magnitude(values))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["positions", "heads", "features"])
def test_the_signature_alone_sees_an_exchange(axis):
    tensor = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
    order = list(range(tensor.shape[axis]))
    order[1], order[2] = order[2], order[1]
    before, after = (measured([each], 0)[0] for each in (tensor, tensor.index_select(axis, torch.tensor(order))))
    assert abs(before.signature - after.signature) > 0.01
    for name in set(Statistics._fields) - {"signature"}:
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-12, abs=1e-12)


def test_the_signature_of_a_later_position_is_not_that_of_an_earlier_one():
    row = torch.ones(1, 8)
    assert len({round(measured([row], start)[0].signature, 9) for start in range(4096)}) == 4096


def test_figures_that_are_no_numbers_pass_without_a_warning():
    broken = torch.tensor([[math.inf, -math.inf], [math.nan, 1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = measured([broken], 0)
        found = found.joined(measured([broken], 2)[0])
    assert found.nonfinite == 6 and found.size == 8
    assert all(math.isnan(each) for each in (found.mean, found.m2, found.min, found.max, found.sum))


def test_measuring_changes_nothing():
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    copy = tensor.clone()
    measured([tensor, tensor], 0)
    assert torch.equal(tensor, copy)
