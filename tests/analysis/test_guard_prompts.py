"""The guards on what the starter model really said: prompts that make it loop, and ordinary ones.

tests/data/guard_prompts.json holds the prompts, the tokens and what was measured, and says how.
"""

import json

import pytest
from branches import a_step

from decodescope.analysis.guard_rules import parse_guard
from decodescope.analysis.guards import Guards
from decodescope.analysis.repeats import LoopFinder
from decodescope.trace.records import Step
from repository import ROOT

RECORDED = json.loads((ROOT / "tests/data/guard_prompts.json").read_text(encoding="utf-8"))
SAID = [said for prompt in RECORDED["ordinary"] for said in (prompt["greedy"], prompt["warm"])]


def steps(ids: list[int]) -> list[Step]:
    return [a_step(n, token_id=token_id, text=RECORDED["texts"][str(token_id)]) for n, token_id in enumerate(ids)]


def first_loop(ids: list[int]) -> tuple[int, str] | tuple[None, None]:
    finder = LoopFinder()
    for step in steps(ids):
        finder.push(step.token_id, step.text)
        if finder.loop:
            return step.step, finder.loop.kind
    return None, None


def stopped_at(ids: list[int]) -> int | None:
    guards = Guards([parse_guard("loop")])
    return next((step.step for step in steps(ids) if guards.see(step, 0.0)), None)


@pytest.mark.parametrize("looping", RECORDED["looping"], ids=lambda looping: looping["prompt"][:30])
def test_a_real_loop_is_found_and_stopped_where_it_was(looping):
    assert first_loop(looping["ids"]) == (looping["found_at"], looping["loop"])
    assert stopped_at(looping["ids"]) == looping["stopped_at"]


def test_nearly_all_loops_are_stopped_and_of_each_kind_one_is_there():
    stopped = [looping["stopped_at"] is not None for looping in RECORDED["looping"]]
    assert len(stopped) >= 10 and stopped.count(False) <= 1  # that one ended by itself
    assert {looping["loop"] for looping in RECORDED["looping"]} == {"exact", "numbered", "ngrams"}


def test_no_ordinary_text_is_taken_for_a_loop():
    assert len(RECORDED["ordinary"]) == 50
    assert [said["ids"] for said in SAID if first_loop(said["ids"])[0] is not None] == []
    assert [said["ids"] for said in SAID if stopped_at(said["ids"]) is not None] == []


def test_low_entropy_does_not_tell_a_loop_from_good_text():
    """Why the guard against loops looks at tokens: code is said with less entropy than any loop."""
    ordinary = sorted(said["lowest_entropy_nats"] for said in SAID)
    assert ordinary[0] < min(looping["lowest_entropy_nats"] for looping in RECORDED["looping"])
    assert sum(lowest < 1.5 for lowest in ordinary) > 0.9 * len(ordinary)


def test_high_entropy_of_ordinary_text_has_a_bound():
    assert max(said["highest_entropy_nats"] for said in SAID) < 6
