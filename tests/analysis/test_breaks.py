"""Break conditions: what they read, and that they hold at the newest step of the branch alone."""

import math
from dataclasses import replace

import pytest
from branches import a_step

from decodescope.analysis.breaks import Breaks, parse_break
from decodescope.analysis.repeats import LOOP_TOKENS
from decodescope.errors import InputError
from decodescope.trace.records import Step

STEP = a_step(entropy_nats=2.0, rank=5, margin_logits=0.5, token_id=77, text=" tea")


def met(condition: str, path: list[Step], nonfinite: bool = False) -> bool:
    rule = parse_break(condition)
    found = Breaks([rule]).met(path, nonfinite)
    assert found is None or found == rule
    return found is not None


def branch(pieces: list[str]) -> list[Step]:
    return [a_step(n, text=piece, delta_text=piece) for n, piece in enumerate(pieces)]


@pytest.mark.parametrize(
    "condition, name, value",
    [
        ("entropy>2.0", "entropy", 2.0),
        ("entropy > 2", "entropy", 2.0),
        ("rank>5", "rank", 5.0),
        ("margin<0.5", "margin", 0.5),
        ("token= the", "token", " the"),
        ("token==", "token", "="),
        ("text=a>b\n", "text", "a>b\n"),
        ("nonfinite", "nonfinite", ""),
        ("loop", "loop", ""),
    ],
)
def test_a_condition_is_read_with_its_value_and_kept_as_written(condition, name, value):
    rule = parse_break(condition)
    assert (rule.name, rule.written) == (name, condition)
    assert value == (rule.limit if isinstance(value, float) else rule.text)


@pytest.mark.parametrize(
    "condition, key",
    [
        ("", "unknown"), ("prob>0.5", "unknown"), ("Loop", "unknown"), (">2", "unknown"), ("[red]=1", "unknown"),
        ("entropy", "form"), ("entropy<2", "form"), ("entropy=2", "form"), ("entropy>", "form"), ("margin>1", "form"),
        ("token=", "form"), ("text", "form"), ("text>a", "form"), ("loop=3", "form"), ("nonfinite>0", "form"),
        ("entropy>x", "limit"), ("entropy>nan", "limit"), ("entropy>inf", "limit"), ("entropy>=2", "limit"),
        ("entropy>0", "limit"), ("margin<-1", "limit"), ("margin<1e999", "limit"),
        ("rank>1.5", "rank"), ("rank>0", "rank"), ("rank>first", "rank"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_read_is_refused_in_one_sentence(condition, key):
    with pytest.raises(InputError) as fault:
        parse_break(condition)
    assert fault.value.key == f"break.{key}"
    assert str(fault.value).startswith("--break") and "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "condition, holds",
    [
        ("entropy>1.9", True), ("entropy>2.0", False),
        ("rank>4", True), ("rank>5", False),
        ("margin<0.6", True), ("margin<0.5", False),
        ("token= tea", True), ("token=tea", False), ("token=77", True), ("token=7", False),
    ],
)  # fmt: skip
def test_a_limit_is_passed_and_not_only_reached(condition, holds):
    assert met(condition, [STEP]) is holds
    assert not met(
        condition, [STEP, replace(STEP, entropy_nats=0.1, rank=1, margin_logits=9.0, token_id=1, text="x")]
    )


def test_a_value_that_is_no_number_passes_no_limit():
    step = replace(STEP, entropy_nats=math.nan, margin_logits=math.nan)
    assert not met("entropy>1", [step]) and not met("margin<1", [step])


def test_a_text_is_met_where_it_is_completed_and_not_again_after():
    path = branch(["for", " i", "", " in ran", "ge", "", "(3)"])
    assert [met("text=in range", path[: n + 1]) for n in range(len(path))] == [n == 4 for n in range(len(path))]
    assert [met("text=i", path[: n + 1]) for n in range(4)] == [False, True, False, True]


def test_a_text_that_was_there_is_met_when_it_comes_once_more():
    path = branch(["ab", "c", "ab", "abab"])
    assert [met("text=ab", path[: n + 1]) for n in range(4)] == [True, False, True, True]
    assert met("text=aba", branch(["aba", "ba"]))  # overlapping
    assert met("text=abc", branch(["xxab", "c"])) and not met("text=abc", branch(["xabc", ""]))


def test_a_non_finite_value_is_the_callers_to_see():
    assert met("nonfinite", [STEP], nonfinite=True)
    assert not met("nonfinite", [STEP])


def test_a_loop_is_met_once_and_again_on_another_branch():
    straight = [a_step(n, token_id=7) for n in range(60)]
    left = straight[:20] + [a_step(n, token_id=100 + n) for n in range(20, 60)]
    breaks = Breaks([parse_break("loop")])
    at = [n for n in range(60) if breaks.met(straight[: n + 1])]
    assert at == [LOOP_TOKENS]
    assert not any(breaks.met(left[: n + 1]) for n in range(20, 60))
    assert breaks.met(straight[: LOOP_TOKENS + 1])  # back on the first one


def test_the_first_condition_that_holds_is_told():
    rules = [parse_break(text) for text in ("rank>9", "entropy>1", "margin<2")]
    assert Breaks(rules).met([STEP]) is rules[1]
    assert Breaks([]).met([STEP]) is None
