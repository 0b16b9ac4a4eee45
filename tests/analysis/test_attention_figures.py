"""Figures of attention on patterns whose answers are known, and pooling against the plain definition."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodescope.analysis.attention import (
    CHARACTER_FROM,
    FIGURES,
    HeadFigures,
    PooledPattern,
    has_figures,
    head_figures,
    kv_head_of,
    row_figures,
)

IDS = torch.tensor([5, 7, 5, 7, 7])  # the last token stood at 1 and 3, too


def figures_of(*weights: float) -> dict[str, float]:
    """The figures of one row that gives these weights, one a column, the last being its own."""
    pattern, positions = torch.tensor([[weights]]), torch.tensor([len(weights) - 1])
    return dict(zip(FIGURES, row_figures(pattern, positions, IDS)[:, 0, 0].tolist(), strict=True))


def test_an_even_row_has_the_most_entropy_and_half_the_way_as_distance():
    even = figures_of(0.2, 0.2, 0.2, 0.2, 0.2)
    assert even["entropy_nats"] == pytest.approx(log(5))
    assert even["distance_tokens"] == pytest.approx(2.0)


def test_a_row_that_looks_at_one_token_has_no_entropy():
    for column in range(5):
        row = figures_of(*(float(column == c) for c in range(5)))
        assert row["entropy_nats"] == 0.0
        assert row["distance_tokens"] == 4 - column
        shares = {name: row[name] for name in FIGURES[2:]}
        at = {
            "sink_share": column == 0,
            "previous_share": column == 3,
            "self_share": column == 4,
            "duplicate_share": column in (1, 3),
        }
        assert shares == at


def test_shares_are_the_weights_they_are_named_after():
    row = figures_of(0.1, 0.2, 0.05, 0.25, 0.4)
    expected = {"sink_share": 0.1, "previous_share": 0.25, "self_share": 0.4, "duplicate_share": 0.2 + 0.25}
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_first_token_has_no_previous_one_and_no_duplicate():
    assert figures_of(1.0) == dict(zip(FIGURES, (0, 0, 1, 0, 1, 0), strict=True))
    has = has_figures(torch.arange(5), IDS)
    assert has.tolist() == [
        [True] * 5,
        [True] * 5,
        [True] * 5,
        [False, True, True, True, True],
        [True] * 5,
        [False, False, True, True, True],
    ]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_any_pattern_gives_what_the_words_say(ids, heads, seed):
    T = len(ids)
    scores = torch.randn(heads, T, T, generator=torch.Generator().manual_seed(seed)) * 3
    pattern = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1)
    figures = row_figures(pattern, torch.arange(T), torch.tensor(ids))
    for h in range(heads):
        for r in range(T):
            row = pattern[h, r].double().tolist()
            expected = (
                -sum(w * log(w) for w in row if w),
                sum(w * (r - c) for c, w in enumerate(row)),
                row[0],
                row[r - 1] if r else 0.0,
                row[r],
                sum(row[c] for c in range(r) if ids[c] == ids[r]),
            )
            assert figures[:, h, r].tolist() == pytest.approx(expected, abs=1e-5)


def test_means_are_over_the_rows_that_have_such_a_token():
    sums = torch.tensor([3.0, 6.0, 1.5, 2.0, 0.75, 0.0], dtype=torch.float64)
    figures = head_figures(sums, torch.tensor([3, 3, 3, 2, 3, 0]))
    assert figures == HeadFigures(1.0, 2.0, 0.5, 1.0, 0.25, None)
    alone = head_figures(torch.tensor([0.0, 0, 1, 0, 1, 0]), torch.tensor([1, 1, 1, 0, 1, 0]))
    assert alone.previous_share is None and alone.duplicate_share is None


@pytest.mark.parametrize(
    ("shares", "character"),
    [
        ((0.1, 0.5, 0.2, 0.1), "previous"),
        ((0.1, 0.2, 0.5, 0.1), "self"),
        ((0.1, 0.2, 0.1, 0.5), "duplicate"),
        ((0.5, 0.2, 0.1, 0.1), "first"),
        ((0.5, None, 0.1, None), "first"),
        ((0.5, 0.5, 0.0, 0.0), "previous"),
        ((CHARACTER_FROM, 0.1, 0.1, 0.1), "first"),
        ((CHARACTER_FROM - 1e-9, 0.1, 0.1, 0.1), "mixed"),
        ((0.0, None, 0.0, None), "mixed"),
    ],
)
def test_the_largest_share_names_the_head(shares, character):
    sink, previous, itself, duplicate = shares
    assert HeadFigures(1.0, 1.0, sink, previous, itself, duplicate).character == character


def test_query_heads_share_kv_heads_in_order():
    assert [kv_head_of(h, 8, 2) for h in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [kv_head_of(h, 3, 3) for h in range(3)] == [0, 1, 2]
    assert [kv_head_of(h, 3, 1) for h in range(3)] == [0, 0, 0]


@given(st.integers(1, 23), st.integers(1, 9), st.integers(1, 7), st.integers(0, 1000))
def test_pooling_takes_the_largest_visible_weight_whatever_the_blocks(T, bins, block, seed):
    pattern = torch.rand(2, T, T, generator=torch.Generator().manual_seed(seed))
    seen = torch.ones(T, T).tril() > 0
    pooled = PooledPattern(2, T, T, bins)
    for start in range(0, T, block):
        rows = slice(start, start + block)
        stop = min(start + block, T)  # what is cached by then
        pooled.add(pattern[:, rows, :stop], seen[None, rows, :stop], start)
    values, width = pooled.values(), -(-T // bins)
    assert values.shape == (2, -(-T // width), -(-T // width)) and values.shape[1] <= bins
    blank = pattern.masked_fill(~seen, -1.0)
    for r in range(values.shape[1]):
        for c in range(values.shape[2]):
            cell = blank[:, r * width : (r + 1) * width, c * width : (c + 1) * width].amax((1, 2))
            assert values[:, r, c].isnan().tolist() == (cell < 0).tolist()
            assert torch.equal(values[:, r, c].nan_to_num(-1.0), cell)


def test_a_weight_of_zero_that_is_visible_is_not_blank():
    pooled = PooledPattern(1, 1, 3, 9)
    pooled.add(torch.tensor([[[1.0, 0.0, 0.0]]]), None, 0)
    assert pooled.values().tolist() == [[[1.0, 0.0, 0.0]]]
