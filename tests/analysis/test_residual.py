"""What a layer does to the residual stream, position by position."""

import math

import pytest
import torch

from decodescope.analysis.residual import stream_change, stream_rows


def rows(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    pre = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    attention = torch.tensor([[0.0, 5.0], [0.0, 1.0], [1.0, 0.0]])
    mlp = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
    mid = pre + attention
    given = {"attn_out": attention, "mlp_out": mlp, "resid_pre": pre, "resid_mid": mid, "resid_post": mid + mlp}
    return stream_rows(**{name: (value * scale).to(dtype) for name, value in given.items()})


def test_the_figures_are_those_of_the_definitions():
    before, after, growth, cosine, attention, mlp, share = rows()
    assert before.tolist() == [5.0, 1.0, 2.0]
    assert after.tolist() == pytest.approx([math.hypot(4, 9), math.hypot(4, 1), math.hypot(1, 2)])
    assert growth.tolist() == pytest.approx([math.hypot(4, 9) / 5, math.hypot(4, 1), math.hypot(1, 2) / 2])
    assert cosine.tolist() == pytest.approx(
        [48 / (5 * math.hypot(4, 9)), 4 / math.hypot(4, 1), 4 / (2 * math.hypot(1, 2))]
    )
    assert attention.tolist() == [1.0, 1.0, 0.5]
    assert mlp.tolist() == pytest.approx([1 / math.hypot(3, 9), 3 / math.hypot(1, 1), 0.0])
    assert share.tolist() == pytest.approx([5 / 6, 1 / 4, 1.0])


def test_a_median_is_not_moved_by_one_position_of_a_thousand_times_the_norm():
    plain = stream_change(0, 0, rows())
    loud = stream_change(0, 0, torch.cat((rows(), rows(1000.0)[:, :1], rows()), dim=1))
    assert (loud.growth, loud.cosine) == (plain.growth, plain.cosine)
    assert plain.norm_before == 2.0


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e37), (torch.bfloat16, 1e37), (torch.float16, 6e3)])
def test_squares_never_overflow(dtype, scale):
    change = stream_change(0, 0, rows(scale, dtype))
    assert change.growth == pytest.approx(stream_change(0, 0, rows()).growth, rel=1e-2)


def test_a_nan_is_not_hidden():
    broken = rows()
    broken[3, 1] = math.nan
    assert math.isnan(stream_change(0, 0, broken).cosine)
