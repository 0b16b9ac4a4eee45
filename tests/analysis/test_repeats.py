"""Repeated suffixes and loops: against a search by hand, and what is a loop and what is none."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.analysis.repeats import LOOP_TOKENS, LoopFinder, RepeatedSuffix, find_loop

FEW = st.lists(st.integers(0, 2), max_size=60)
BLOCK = st.lists(st.integers(0, 50), min_size=1, max_size=12)
TEXTS = {0: "\n", 1: "1", 2: "2", 3: ".", 4: " tea", 5: " and", 6: " 7"}


def texts_of(ids: list[int]) -> list[str]:
    return [TEXTS.get(token_id, "x") for token_id in ids]


def longest_repeat(ids: list[int]) -> tuple[int, int]:
    """(length, lag) by trying every lag."""
    best = (0, 0)
    for lag in range(1, len(ids)):
        length = 0
        while length + lag < len(ids) and ids[-1 - length] == ids[-1 - length - lag]:
            length += 1
        best = max(best, (length, -lag))
    return best[0], -best[1] if best[0] else 0


def pushed(ids: list[int]) -> RepeatedSuffix:
    suffix = RepeatedSuffix()
    for token_id in ids:
        suffix.push(token_id)
    return suffix


def found(ids: list[int], texts: list[str] | tuple[()] = (), least: int = LOOP_TOKENS) -> LoopFinder:
    finder = LoopFinder(least)
    for token_id, text in zip(ids, texts or [""] * len(ids), strict=True):
        finder.push(token_id, text)
    return finder


def cut(text: str) -> tuple[list[int], list[str]]:
    """Tokens such as Qwen's: words with the space before them, digits one by one, marks."""
    texts = re.findall(r"\d| ?[^\W\d_]+|\n+| +|.", text)
    known = {word: number for number, word in enumerate(dict.fromkeys(texts))}
    return [known[word] for word in texts], texts


@settings(max_examples=150, derandomize=True, deadline=None)
@given(FEW)
def test_the_longest_repeated_suffix_is_the_one_a_search_finds(ids):
    suffix = pushed(ids)
    assert (suffix.length, suffix.lag) == longest_repeat(ids)


def test_a_long_text_outgrows_its_first_room():
    ids = [*range(700), *range(650)]
    suffix = pushed(ids)
    assert (suffix.length, suffix.lag) == (650, 700)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(FEW, FEW, st.integers(0, 60))
def test_forgetting_equals_never_having_seen(ids, others, length):
    suffix, straight = pushed(ids), pushed(ids[:length] + others)
    suffix.forget_from(length)
    for token_id in others:
        suffix.push(token_id)
    assert (suffix.length, suffix.lag) == (straight.length, straight.lag)


LOOPING = st.tuples(FEW, BLOCK, st.integers(3, 30)).map(lambda t: t[0] + t[1] * t[2])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(LOOPING | st.lists(st.integers(0, 6), max_size=90), st.integers(0, 90), st.integers(4, 40))
def test_a_loop_seen_token_by_token_is_the_loop_found_at_once(ids, length, least):
    texts = texts_of(ids)
    finder = found(ids, texts, least)
    assert finder.loop == find_loop(ids, texts, least)
    finder.forget_from(length)
    assert finder.loop == find_loop(ids[:length], texts[:length], least)
    finder.follow(ids[: length // 2] + ids, texts[: length // 2] + texts)
    assert finder.loop == find_loop(ids[: length // 2] + ids, texts[: length // 2] + texts, least)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(FEW, BLOCK, st.integers(0, 11))
def test_a_block_said_again_and_again_is_an_exact_loop_wherever_it_breaks_off(before, block, cut):
    copies = LOOP_TOKENS // len(block) + 3
    ids = before + block * copies + block[: cut % len(block)]
    loop = find_loop(ids)
    assert loop is not None and loop.kind == "exact"
    assert len(block) % loop.period == 0  # the block may itself repeat a shorter one
    assert ids[loop.start :][: loop.period] * loop.repeats == ids[loop.start :][: loop.period * loop.repeats]
    assert loop.repeats >= 3 and loop.repeated_tokens >= loop.needed_tokens >= LOOP_TOKENS


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=100, unique=True))
def test_what_is_said_twice_is_no_loop(block):
    assert find_loop(block + block) is None


def test_a_loop_that_is_left_is_none():
    assert find_loop([1, 2, 3] * 40) is not None
    assert find_loop([1, 2, 3] * 40 + [9]).kind == "ngrams"  # nearly all of the tail still goes round
    assert find_loop([1, 2, 3] * 40 + list(range(10, 30))) is None


def test_a_loop_needs_its_tokens_and_its_third_copy():
    assert find_loop([5] * LOOP_TOKENS) is None
    assert find_loop([5] * (LOOP_TOKENS + 1)).repeats == LOOP_TOKENS + 1
    block = list(range(40))
    assert find_loop(block * 3 + block[:-1], least=200) is None
    assert find_loop((block * 3)[:80]) is None
    assert find_loop(block * 3).needed_tokens == 80


def test_a_list_of_the_same_items_that_counts_up_is_a_numbered_loop():
    ids, texts = cut("Here:\n" + "".join(f"{n}. Rhine\n" for n in range(1, 30)))
    assert find_loop(ids) is None
    loop = find_loop(ids, texts)
    assert loop.kind == "numbered" and loop.period == len(cut("12. Rhine\n")[0])
    assert "".join(texts[loop.start :]).startswith("\n1. Rhine\n2. Rhine\n")


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{n}\n" for n in range(1, 100)),  # counting
        "".join(f"{n}.\n" for n in range(1, 100)),
        ", ".join(str(n) for n in range(1, 100)),
        "".join(f"7 x {n} = {7 * n}\n" for n in range(1, 30)),
        "".join(f"print(is_prime({n}))\n" for n in range(1, 40)),
        "".join(f'{{"x": {n}, "y": {n * n}}},\n' for n in range(1, 30)),
        "".join(f"<li>Item {n}</li>\n" for n in range(1, 30)),
        "| a | b | c |\n|---|---|---|\n"
        + "".join(f"| {n} | {n * 3 % 7} | {'yes' if n % 3 else 'no'} |\n" for n in range(20)),
        "".join(f"1. one {word}\n" for word in ("red", "blue", "green", "black", "white", "brown")),
        "la la la\nla la\n" * 2,
        "0 0 0\n0 0 0\n0 0 0\n",
    ],
)
@pytest.mark.parametrize("end", [1.0, 0.7, 0.4])
def test_counting_tables_and_code_are_no_loops(text, end):
    ids, texts = cut(text[: int(len(text) * end)])
    assert find_loop(ids, texts) is None


def test_a_few_sentences_in_changing_order_are_a_loop_at_the_third_time():
    first, second, third = list(range(20)), list(range(20, 35)), list(range(35, 60))
    said = first + second + third + second + first + third
    assert find_loop(said) is None
    loop = find_loop(said + first + third)
    assert (loop.kind, loop.period, loop.repeats) == ("ngrams", 45, 3)


@pytest.mark.parametrize("between, is_loop", [(LOOP_TOKENS, True), (LOOP_TOKENS - 1, False), (20, False)])
def test_lines_that_differ_in_one_place_are_no_loop_unless_they_are_long(between, is_loop):
    """The changed token and the three after it complete new 4-grams; between two such places all others are known."""
    lines = [[1000 + number, *range(between + 3)] for number in range(6)]
    ids = [token_id for line in lines for token_id in line]
    seen = [find_loop(ids[: n + 1]) for n in range(len(ids))]
    assert any(loop is not None for loop in seen) is is_loop
