"""distinct-n and repetition rate: hand-counted, and the laws that bind them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.analysis.repetition import distinct, repetition_rate

IDS = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize(
    "ids, n, share",
    [
        ([1, 2, 3, 4], 1, 1.0),
        ([1, 1, 1, 1], 1, 0.25),
        ([1, 2, 1, 2, 1], 2, 0.5),  # 12 21 12 21
        ([1, 2, 3, 1, 2, 3, 1], 3, 3 / 5),
        ([1, 2, 3], 3, 1.0),
    ],
)
def test_distinct_n_counts_each_n_gram_once(ids, n, share):
    assert distinct(ids, n) == share


def test_a_text_shorter_than_n_has_no_n_gram_and_no_figure():
    assert distinct([], 1) is None
    assert distinct([1, 2], 3) is None
    assert repetition_rate([1, 2, 3]) is None
    with pytest.raises(ValueError, match="at least one token"):
        distinct([1], 0)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(IDS, st.integers(1, 5))
def test_the_rate_is_the_share_of_n_grams_that_stood_before(ids, n):
    grams = [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]
    earlier: Counter = Counter()
    old = 0
    for gram in grams:
        old += earlier[gram] > 0
        earlier[gram] += 1
    assert repetition_rate(ids, n) == (pytest.approx(old / len(grams)) if grams else None)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(IDS.filter(bool))
def test_a_text_said_twice_over_repeats_more_than_half_of_itself(ids):
    assert repetition_rate(ids + ids, 1) >= 0.5
