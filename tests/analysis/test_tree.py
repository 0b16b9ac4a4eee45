"""The tree of a run: every token is drawn once, partings and ends cut stretches, sums are those of the branch."""

import math
from dataclasses import replace

from branches import a_step
from hypothesis import given
from hypothesis import strategies as st

from decodescope.analysis.tree import THE_RUN, parts_at, stretches
from decodescope.trace.records import Branch, End, Run, Step, Trace, path_to


def plain_run() -> Run:
    return Run(
        "starter", "file", "/models/m.gguf", None, None, "Qwen2ForCausalLM", "float32", "cpu", "sdpa", True,
        "p0", (), (), (), (), 64, 24576, 151936, {}, "2026-01-01T00:00:00Z",
    )  # fmt: skip


def an_end(node: int | None) -> End:
    return End("length", None, "", 5, 0, None, None, None, node=node)


def a_branch(step: int, node: int | None) -> Branch:
    return Branch(step, (), "2026-01-01T00:00:00Z", an_end(node))


def tree(*parents: int | None) -> list[Step]:
    """A step for each parent, node ids in order."""
    steps: list[Step] = []
    for node, parent in enumerate(parents):
        number = 0 if parent is None else steps[parent].step + 1
        step = a_step(number, token_id=node, text=f"t{node}", logprob_nats=-1.0 - node / 8)
        steps.append(replace(step, node=node, parent=parent))
    return steps


def drawn(trace: Trace) -> list[tuple[int, list[int], list[int]]]:
    return [(s.depth, [step.node for step in s.steps], [e.number for e in s.endings]) for s in stretches(trace)]


def test_a_run_without_forks_is_one_stretch():
    steps = tree(None, 0, 1)
    assert drawn(Trace(plain_run(), steps, an_end(2))) == [(0, [0, 1, 2], [THE_RUN])]
    assert drawn(Trace(plain_run(), steps)) == [(0, [0, 1, 2], [])]
    assert drawn(Trace(plain_run(), [], an_end(None))) == [(0, [], [THE_RUN])]
    assert drawn(Trace(plain_run(), [])) == []


def test_branches_that_leave_stand_before_the_one_that_goes_on():
    steps = tree(None, 0, 1, 0, 3, 3)  # 1-2 is kept; 3 leaves behind 0, and parts into 4 and 5
    trace = Trace(plain_run(), steps, an_end(2), [a_branch(1, 4), a_branch(2, 5)])
    assert drawn(trace) == [(0, [0], []), (1, [3], []), (2, [5], [2]), (1, [4], [1]), (0, [1, 2], [THE_RUN])]
    assert [s.kept for s in stretches(trace)] == [True, False, False, False, True]
    assert [s.parted for s in stretches(trace)] == [False, True, True, True, True]
    assert [s.is_leaf for s in stretches(trace)] == [False, False, True, True, True]


def test_a_fork_without_a_token_and_one_behind_the_end_are_drawn_where_they_end():
    steps = tree(None, 0, 1, 1)
    trace = Trace(
        plain_run(), steps, an_end(1), [a_branch(2, 2), a_branch(2, 3), a_branch(1, 0), a_branch(0, None)]
    )
    assert drawn(trace) == [(0, [], [4]), (0, [0], [3]), (0, [1], [THE_RUN]), (1, [3], [2]), (0, [2], [1])]


def test_the_trace_of_a_fork_is_not_taken_for_the_run():
    steps = tree(None, 0, 0)
    trace = Trace(plain_run(), steps, an_end(1), [a_branch(1, 2)])
    fork = trace.branch(1)
    assert drawn(fork) == [(0, [0], []), (1, [1], []), (0, [2], [1])]


@given(st.data())
def test_every_token_is_drawn_once_with_the_log_probability_of_its_branch(data):
    count = data.draw(st.integers(0, 40))
    steps = tree(*(data.draw(st.sampled_from([None, *range(node)])) for node in range(count)))
    nodes = st.sampled_from([None, *range(count)])
    ends = data.draw(st.lists(nodes, max_size=5))
    trace = Trace(plain_run(), steps, an_end(data.draw(nodes)), [a_branch(0, node) for node in ends])
    found = stretches(trace)
    assert sorted(step.node for stretch in found for step in stretch.steps) == list(range(count))
    assert sorted(e.number for stretch in found for e in stretch.endings) == list(range(len(ends) + 1))
    for stretch in filter(lambda stretch: stretch.steps, found):
        path = path_to(steps, stretch.steps[-1].node)
        assert tuple(path[-len(stretch.steps) :]) == stretch.steps
        assert math.isclose(stretch.logprob_nats, sum(step.logprob_nats for step in path))
        assert all(ending.end.node == stretch.steps[-1].node for ending in stretch.endings)
    kept = [step.node for stretch in found if stretch.kept for step in stretch.steps]
    assert kept == [step.node for step in trace.path()]


def test_a_very_long_and_a_very_deep_tree_are_drawn_too():
    long = tree(None, *range(5_000))
    assert len(stretches(Trace(plain_run(), long, an_end(5_000)))) == 1
    deep = [None, *(node // 2 * 2 for node in range(3_000))]  # a token is left at every step
    found = stretches(Trace(plain_run(), tree(*deep), an_end(3_000)))
    assert max(stretch.depth for stretch in found) == 1 and len(found) == 3_001


def test_branches_part_where_their_tokens_do():
    one, two = [a_step(n, token_id=n) for n in range(4)], [a_step(n, token_id=n) for n in range(6)]
    assert parts_at(one, two) is None and parts_at(two, one) is None and parts_at([], two) is None
    assert parts_at([*one, a_step(4, token_id=9)], two) == 4
