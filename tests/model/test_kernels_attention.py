"""Attention over what a cache holds: every format and every way through the C code, against a softmax by hand."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.model.cache_formats import FORMATS, Held, Stored, room
from decodescope.model.kernels import attends
from decodescope.model.kernels.attention import MOST_QUERIES, _attention

EVERY_FORMAT = pytest.mark.parametrize("held", FORMATS.values(), ids=str)
LAW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(values: Tensor, held: torch.dtype, by_position: bool = False) -> Stored:
    """Values as a cache holds them: a slice of a larger buffer, which may lie position by position."""
    large = room(values.new_empty(*values.shape[:2], 0, values.shape[3]), held, values.shape[2] + 3)
    if by_position:
        large = Stored(large.numbers.transpose(1, 2).contiguous().transpose(1, 2), large.scales)
    large.write(0, values)
    return large.first(values.shape[2])


def by_hand(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v in float64, zeros where nothing is visible."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = q.double() @ keys.mT / math.sqrt(q.shape[3])
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ values


def assert_attention(found: Tensor, q: Tensor, keys: Held, values: Held, visible: Tensor | None) -> None:
    """Within float32 rounding of the exact result: of the values, and of scores, whose errors grow with them."""
    expected = by_hand(q, keys.plain(), values.plain(), visible)
    score = q.double().norm(dim=-1).max() * keys.plain().double().norm(dim=-1).max() / math.sqrt(q.shape[3])
    assert found.shape == q.shape and found.dtype == torch.float32
    assert (found - expected).abs().max() <= (1e-6 + 3e-7 * score) * values.plain().abs().max()


@EVERY_FORMAT
@LAW
@given(
    rows=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 9), queries=st.integers(1, MOST_QUERIES),
    positions=st.sampled_from([1, 2, 63, 64, 65, 130, 700]), size=st.sampled_from([16, 48, 64, 80, 128, 256]),
    seen=st.sampled_from(["all", "some of each row", "some of all rows", "nothing", "order"]),
    by_position=st.booleans(), loud=st.sampled_from([1, 40]),
)  # fmt: skip
def test_it_is_the_softmax_by_hand_within_rounding(
    library, held, rows, kv_heads, group, queries, positions, size, seen, by_position, loud
):
    q = torch.randn(rows, kv_heads * group, queries, size) * loud
    keys, values = (
        Held((stored(torch.randn(rows, kv_heads, positions, size), held, by_position),)) for _ in range(2)
    )
    visible = {
        "all": None,
        "some of each row": torch.rand(rows, 1, queries, positions) < 0.3,
        "some of all rows": torch.rand(1, 1, queries, positions) < 0.3,
        "nothing": torch.zeros(1, 1, queries, positions, dtype=torch.bool),
        "order": (torch.arange(positions) <= torch.arange(queries)[:, None] + positions - queries)[None, None],
    }[seen]
    assert_attention(_attention(library, q, keys, values, visible), q, keys, values, visible)


@EVERY_FORMAT
@LAW
@given(
    rows=st.integers(1, 4), lengths=st.lists(st.integers(1, 200), min_size=2, max_size=4),
    shared=st.integers(1, 3), queries=st.integers(1, 3), masked=st.booleans(),
)  # fmt: skip
def test_stretches_count_as_one_and_one_row_is_everybodys(library, held, rows, lengths, shared, queries, masked):
    q, positions = torch.randn(rows, 6, queries, 32), sum(lengths)
    keys, values = (
        Held(
            tuple(
                stored(torch.randn(1 if i < min(shared, len(lengths) - 1) else rows, 3, length, 32), held)
                for i, length in enumerate(lengths)
            )
        )
        for _ in range(2)
    )
    visible = torch.rand(rows, 1, queries, positions) < 0.5 if masked else None
    assert keys.shape == (rows, 3, positions, 32)
    assert_attention(_attention(library, q, keys, values, visible), q, keys, values, visible)


def shifted_mask(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return q, keys, values, visible.roll(1, dims=-1)


def swapped_heads(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return q.view(2, 2, 3, 2, 16).transpose(1, 2).reshape(q.shape), keys, values, visible


def a_missing_position(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    visible = visible.clone()
    visible[0, 0, 0, visible[0, 0, 0].nonzero()[0, 0]] = False
    return q, keys, values, visible


def a_wrong_scale(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return q * 1.001, keys, values, visible


def the_other_rows_past(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return q, keys.flip(0), values.flip(0), visible


@pytest.mark.parametrize(
    "plant", [shifted_mask, swapped_heads, a_missing_position, a_wrong_scale, the_other_rows_past]
)
def test_a_planted_fault_is_found(library, plant: Callable[..., tuple[Tensor, ...]]):
    q, visible = torch.randn(2, 6, 2, 16), torch.rand(2, 1, 2, 90) < 0.5
    keys, values = torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16)
    wrong_q, wrong_keys, wrong_values, wrong_visible = plant(q, keys, values, visible)
    held = [Held((Stored(each),)) for each in (keys, values, wrong_keys, wrong_values)]
    found = _attention(library, wrong_q, *held[2:], wrong_visible)
    assert_attention(found, wrong_q, *held[2:], wrong_visible)
    with pytest.raises(AssertionError):
        assert_attention(found, q, *held[:2], visible)


@EVERY_FORMAT
def test_the_number_of_threads_changes_no_bit(library, held, all_threads):
    q = torch.randn(2, 14, 3, 64)
    keys, values = (Held((stored(torch.randn(2, 2, 3000, 64), held),)) for _ in range(2))
    found = _attention(library, q, keys, values, None)
    torch.set_num_threads(1)
    assert torch.equal(found, _attention(library, q, keys, values, None))


@EVERY_FORMAT
def test_every_number_of_a_format_is_read_as_torch_reads_it(library, held):
    """A single position comes out as it is."""
    every = torch.arange(65536) if held.itemsize > 1 else torch.arange(256).repeat(256)
    wide = every << (16 if held.itemsize == 4 else 0)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[held.itemsize]
    values = Held((Stored(wide.to(bits).view(held).view(256, 1, 1, 256)),))
    keys = Held((Stored(torch.zeros_like(values.plain())),))
    found = _attention(library, torch.ones(256, 1, 1, 256), keys, values, None)
    torch.testing.assert_close(found, values.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_comes_out_as_from_torch(library, where, fault, held):
    q, past = torch.randn(1, 4, 3, 16), {name: torch.randn(1, 2, 70, 16).to(held) for name in ("keys", "values")}
    past[where][0, 1, 66, 5] = fault
    q[..., 5] = torch.tensor(
        [[1.0, -1.0, 2.0]]
    )  # of either sign, so that some scores are infinite and some minus that
    found = _attention(library, q, *(Held((Stored(each),)) for each in past.values()), None)
    theirs = F.scaled_dot_product_attention(q, *(each.float() for each in past.values()), enable_gqa=True)
    assert not theirs.isfinite().all()
    torch.testing.assert_close(found, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_masked_keys_count_for_nothing_whatever_they_are(library):
    q, keys, values = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16)
    visible = torch.rand(1, 1, 1, 200) < 0.5
    found = [_attention(library, q, Held((Stored(keys),)), Held((Stored(values),)), visible)]
    for hidden in (torch.nan, torch.inf, 1e30):
        keys[:, :, ~visible[0, 0, 0]] = hidden
        found.append(_attention(library, q, Held((Stored(keys),)), Held((Stored(values),)), visible))
    assert all(torch.equal(each, found[0]) for each in found)


def test_nothing_visible_gives_zeros_as_from_torch(library):
    q, keys, values = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    visible = torch.tensor([[False] * 9, [True] * 9])[None, None]
    found = _attention(library, q, Held((Stored(keys),)), Held((Stored(values),)), visible)
    theirs = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
    assert not theirs[:, :, 0].any() and not found[:, :, 0].any()
    torch.testing.assert_close(found, theirs)


def test_queries_are_taken_in_any_dtype_and_order(library):
    keys, values = (Held((Stored(torch.randn(2, 2, 40, 32)),)) for _ in range(2))
    q = torch.randn(2, 3, 4, 32).transpose(1, 2)  # 2 4 3 32, as it comes from a projection
    assert_attention(_attention(library, q, keys, values, None), q, keys, values, None)
    for dtype in (torch.bfloat16, torch.float16):
        assert_attention(_attention(library, q.to(dtype), keys, values, None), q.to(dtype), keys, values, None)


def test_it_is_asked_only_for_what_it_can_do():
    fine = torch.empty(1, 2, 1, 32)
    keys = Held((Stored(torch.empty(1, 1, 4, 32)),))
    assert not attends(
        torch.empty(1, 2, 1, 24), Held((Stored(torch.empty(1, 1, 4, 24)),))
    )  # heads of no whole lanes
    assert not attends(torch.empty(1, 2, MOST_QUERIES + 1, 32), keys)
    assert not attends(fine, Held((Stored(torch.empty(1, 1, 4, 32, dtype=torch.float64)),)))
    assert not attends(fine.to("meta"), Held((Stored(torch.empty(1, 1, 4, 32, device="meta")),)))
