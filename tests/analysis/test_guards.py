"""Guards: what they read, when they act, and the laws that keep them from harm."""

from dataclasses import replace
from itertools import pairwise

import pytest
from branches import a_step
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.analysis.guard_rules import GUARD_LOOP_TOKENS, parse_guard
from decodescope.analysis.guards import Guards
from decodescope.errors import InputError
from decodescope.trace.records import Intervention, Step


def steps(entropies: list[float], ids: list[int] | None = None) -> list[Step]:
    """A branch with these entropies; without ids no token comes twice."""
    numbers = enumerate(zip(entropies, ids or range(1000, 1000 + len(entropies)), strict=True))
    return [a_step(n, entropy_nats=e, token_id=i, text=f"t{i}") for n, (e, i) in numbers]


def watched(rules: list[str], seen: list[Step], own: float = 0.3) -> list[tuple[Intervention, ...]]:
    """What the guards do at each step, in a run that follows them."""
    return follow(Guards([parse_guard(rule) for rule in rules]), seen, own)


def follow(guards: Guards, seen: list[Step], own: float) -> list[tuple[Intervention, ...]]:
    done = []
    for step in seen:
        done.append(guards.see(step, own if guards.temperature is None else guards.temperature))
    return done


def acted(done: list[tuple[Intervention, ...]]) -> list[tuple[int, str, float | None]]:
    return [(at, record.action, record.temperature) for at, records in enumerate(done) for record in records]


LOOPING = list(range(20)) + [90, 91, 92, 93] * 40


@pytest.mark.parametrize(
    "text, whole",
    [
        ("loop", "loop=stop,window=16"),
        ("loop=warn", "loop=warn,window=16"),
        ("loop=0.9,window=8", "loop=0.9,window=8"),
        ("entropy=1.5:0.7", "entropy=1.5:0.7,window=16,release=2.25"),
        ("entropy=0.01:stop,window=64", "entropy=0.01:stop,window=64,release=0.015"),
        ("entropy=1:warn,release=3,window=2", "entropy=1.0:warn,window=2,release=3.0"),
        ("high_entropy=6:0.2", "high_entropy=6.0:0.2,window=16,release=4.0"),
        ("high_entropy=6:0,release=1", "high_entropy=6.0:0.0,window=16,release=1.0"),
    ],
)
def test_a_rule_is_read_whole_and_its_text_is_read_again_as_the_same(text, whole):
    rule = parse_guard(text)
    assert str(rule) == whole
    assert parse_guard(whole) == rule


@pytest.mark.parametrize(
    "text, key",
    [
        ("", "unknown"), ("loops", "unknown"), ("Entropy=1:warn", "unknown"), ("window=3", "unknown"),
        ("loop=", "action"), ("loop=pause", "action"), ("loop=nan", "action"), ("loop=inf", "action"),
        ("loop=0", "raise_to"), ("loop=-1", "raise_to"), ("entropy=1:101", "raise_to"),
        ("high_entropy=5:-0.1", "lower_to"), ("high_entropy=5:1e9", "lower_to"),
        ("entropy", "nats"), ("entropy=1.5", "nats"), ("entropy=:0.7", "nats"), ("entropy=0:0.7", "nats"),
        ("entropy=-1:warn", "nats"), ("entropy=nan:warn", "nats"), ("high_entropy=warn", "nats"),
        ("entropy=1.5:", "action"), ("entropy=1.5:warn:stop", "action"),
        ("entropy= 1.5:warn", "nats"), ("loop=1.2 ", "action"),
        ("loop,window=0", "window"), ("loop,window=1.5", "window"), ("loop,window=", "window"),
        ("loop,window=²", "window"), ("loop,window=99999999999", "window"), ("loop,window", "window"),
        ("loop,release=1", "option"), ("loop,", "option"), ("loop,windows=3", "option"),
        ("loop,window=3,window=4", "option_twice"),
        ("entropy=1:warn,release=1", "release_above"), ("entropy=1:warn,release=x", "release_above"),
        ("high_entropy=5:warn,release=5", "release_below"), ("high_entropy=5:warn,release=0", "release_below"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused_in_one_sentence(text, key):
    with pytest.raises(InputError) as fault:
        parse_guard(text)
    assert fault.value.key == f"guard.{key}"
    assert str(fault.value).startswith("Guard ") and "\n" not in str(fault.value)


def test_a_loop_is_stopped_once_the_guard_is_sure():
    done = watched(["loop"], steps([1.0] * len(LOOPING), LOOPING))
    (record,) = done[20 + 4 + GUARD_LOOP_TOKENS - 1]
    assert record == Intervention("loop", "stop", 64.0, 64.0, None)
    assert acted(done) == [(20 + 4 + GUARD_LOOP_TOKENS - 1, "stop", None)]


def test_a_broken_loop_gives_the_temperature_back():
    ids = LOOPING + list(range(200, 300))
    done = acted(watched(["loop=0.9,window=12"], steps([1.0] * len(ids), ids)))
    assert [record[1:] for record in done] == [("temperature", 0.9), ("release", 0.3)]
    broken = len(LOOPING)  # the nearly repeated tail wears off first, then the window begins
    assert broken + 12 <= done[1][0] < broken + 12 + GUARD_LOOP_TOKENS


def test_low_entropy_raises_and_gives_back_with_hysteresis():
    low, between, high = [1.0] * 10, [1.9] * 10, [3.0] * 10
    done = watched(["entropy=1.5:0.7,window=4,release=2"], steps(low + between + high))
    assert acted(done) == [(3, "temperature", 0.7), (20, "release", 0.3)]
    assert done[3] == (Intervention("entropy", "temperature", 1.0, 1.5, 0.7),)
    assert done[20] == (Intervention("entropy", "release", pytest.approx((3 * 1.9 + 3) / 4), 2.0, 0.3),)


def test_high_entropy_lowers_and_gives_back():
    done = watched(["high_entropy=4:0.1,window=3"], steps([5.0] * 6 + [3.0] * 4 + [2.0] * 6))
    assert acted(done) == [(2, "temperature", 0.1), (11, "release", 0.3)]


def test_a_warning_is_given_once_an_episode():
    entropies = [0.1] * 12 + [5.0] * 12 + [0.1] * 12
    assert acted(watched(["entropy=1:warn,window=4"], steps(entropies))) == [(3, "warn", None), (27, "warn", None)]


def test_nothing_is_done_before_the_window_is_full():
    assert acted(watched(["entropy=9:stop,window=16", "loop,window=200"], steps([0.0] * 15))) == []
    ids = [7] * 180
    assert acted(watched(["loop,window=180"], steps([1.0] * 180, ids))) == [(179, "stop", None)]


def test_a_raise_never_lowers_and_a_lowering_never_raises():
    seen = steps([1.0] * 40, [7] * 40)
    assert acted(watched(["entropy=2:0.7", "loop=0.7"], seen, own=0.9)) == []
    assert acted(watched(["high_entropy=0.5:0.7"], seen, own=0.3)) == []


def test_a_guard_that_would_not_move_the_temperature_waits_until_it_would():
    guards = Guards([parse_guard("entropy=2:0.7,window=2")])
    seen = steps([1.0] * 6)
    assert follow(guards, seen[:4], 0.9) == [()] * 4
    (record,) = guards.see(seen[4], 0.4)  # the run's own temperature has been changed by hand
    assert (record.action, record.temperature) == ("temperature", 0.7)


def test_of_two_that_raise_the_highest_holds_and_the_other_takes_over():
    rules = ["entropy=1:0.7,window=2,release=2", "entropy=1:0.9,window=4,release=1.5"]
    done = acted(watched(rules, steps([0.5] * 6 + [1.8] * 4 + [3.0] * 4)))
    assert done == [(1, "temperature", 0.7), (3, "temperature", 0.9), (9, "release", 0.7), (10, "release", 0.3)]


def test_where_one_raises_and_one_lowers_the_later_rule_has_the_last_word():
    raise_, lower = "loop=0.9,window=2", "high_entropy=4:0.2,window=2"
    seen = steps([5.0] * 100, [7] * 100)
    both = [acted(watched(rules, seen)) for rules in ([raise_, lower], [lower, raise_])]
    assert both[0] == [(1, "temperature", 0.2)]  # a raise would not move it
    assert both[1] == [(1, "temperature", 0.2), (GUARD_LOOP_TOKENS, "temperature", 0.9)]


def test_a_stop_comes_before_any_change_of_temperature():
    done = watched(
        ["entropy=2:0.7,window=4", "entropy=2:warn,window=4", "entropy=1:stop,window=4"], steps([0.5] * 4)
    )
    assert [record.action for record in done[3]] == ["warn", "stop"]


def test_a_temperature_set_by_hand_is_the_one_to_return_to():
    guards = Guards([parse_guard("entropy=1:0.7,window=2")])
    seen = steps([0.5] * 3 + [5.0] * 3)
    assert acted(follow(guards, seen[:2], 0.3)) == [(1, "temperature", 0.7)]
    assert guards.see(seen[2], 0.5) == ()
    assert acted(follow(guards, seen[3:], 0.5)) == [(0, "release", 0.5)]


def test_values_that_are_no_numbers_move_nothing():
    seen = steps([float("nan")] * 20 + [float("inf")] * 20)
    assert acted(watched(["entropy=9:stop,window=4"], seen)) == []
    assert acted(watched(["high_entropy=9:stop,window=4"], seen)) == [(23, "stop", None)]


ENTROPIES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 8.0]), min_size=1, max_size=80)
WINDOW = st.integers(1, 6)
TEMPERATURE = st.sampled_from([0.2, 0.5, 0.8, 1.1])
ACTION = st.one_of(st.sampled_from(["warn", "stop"]), TEMPERATURE)
RULES = st.lists(
    st.one_of(
        st.builds(
            "entropy={}:{},window={},release={}".format, st.just(1.5), ACTION, WINDOW, st.sampled_from([1.6, 3])
        ),
        st.builds("high_entropy={}:{},window={}".format, st.sampled_from([2.5, 5]), ACTION, WINDOW),
        st.builds("loop={},window={}".format, ACTION, WINDOW),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def branches(draw: st.DrawFn) -> list[Step]:
    """Steps of all sorts of certainty, some of which go round for long."""
    entropies = draw(ENTROPIES)
    ids = [
        id for part in draw(st.lists(st.sampled_from([[1], [2, 3] * 45, [4, 5, 6]]), max_size=3)) for id in part
    ]
    ids += list(range(100, 100 + max(len(entropies) - len(ids), 0)))
    entropies += [1.0] * (len(ids) - len(entropies))
    return steps(entropies, ids)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(RULES, branches(), TEMPERATURE)
def test_each_guard_keeps_its_window_between_two_actions_and_releases_only_what_it_took(rules, seen, own):
    for rule in rules:
        done, window = watched([rule], seen, own), parse_guard(rule).window
        actions = acted(done)
        assert all(later[0] - earlier[0] >= window for earlier, later in pairwise(actions))
        assert not actions or actions[0][0] >= window - 1
        if any(action in ("temperature", "release") for _, action, _ in actions):
            expected = ["temperature", "release"] * len(actions)
            assert [action for _, action, _ in actions] == expected[: len(actions)]
            assert all(temperature == own for _, action, temperature in actions if action == "release")


@settings(max_examples=150, derandomize=True, deadline=None)
@given(RULES, branches(), branches(), st.integers(0, 170), TEMPERATURE)
def test_forgetting_equals_never_having_seen(rules, seen, others, at, own):
    kept = seen[:at]
    rewound, straight = (Guards([parse_guard(rule) for rule in rules]) for _ in range(2))
    follow(rewound, seen, own)
    rewound.forget_from(len(kept))
    follow(straight, kept, own)
    assert rewound.temperature == straight.temperature
    fork = [replace(step, step=step.step + len(kept)) for step in others]
    assert follow(rewound, fork, own) == follow(straight, fork, own)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(RULES, branches(), TEMPERATURE)
def test_the_temperature_stays_between_the_runs_own_and_those_of_the_rules(rules, seen, own):
    read = [parse_guard(rule) for rule in rules]
    raised = [rule.temperature for rule in read if rule.temperature and rule.guard != "high_entropy"]
    lowered = [rule.temperature for rule in read if rule.temperature and rule.guard == "high_entropy"]
    for _, _, temperature in acted(watched(rules, seen, own)):
        assert temperature is None or min([own, *lowered]) <= temperature <= max([own, *raised])
