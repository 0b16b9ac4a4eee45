"""Laws of the end: one definition for every run, and the branch that it speaks of."""

from dataclasses import replace

import pytest
from hypothesis import given
from sample_records import RUNS, plain_end, plain_intervention, plain_run, plain_step, trees

from decodescope.trace.ends import end_of
from decodescope.trace.records import Step, Trace, path_to
from decodescope.trace.saved import read_trace
from decodescope.trace.store import TraceWriter

FORK = [plain_step(node, parent) for node, parent in {0: None, 1: 0, 2: 1, 3: 0, 4: 3}.items()]


def nodes(trace: Trace) -> list[int]:
    return [step.node for step in trace.path()]


@pytest.mark.parametrize(("kept", "text"), [(4, " w0 w3 w4"), (2, " w0 w1 w2"), (3, " w0 w3"), (None, "")])
def test_the_path_is_the_branch_that_was_kept_also_from_disk(tmp_path, kept, text):
    end = end_of(plain_run(), path_to(FORK, kept), "interrupted")
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        for step in FORK:
            writer.write(step)
        writer.finish(end)
    for trace in (Trace(plain_run(), FORK, end), read_trace(tmp_path / "run")):
        assert (trace.end.node, trace.text) == (kept, text)
        assert trace.path() == path_to(FORK, kept)


def test_a_run_that_goes_on_counts_up_to_its_last_step():
    trace = Trace(plain_run(), FORK[:3])
    assert (nodes(trace), trace.text) == ([0, 1, 2], " w0 w1 w2")
    assert (nodes(Trace(plain_run())), Trace(plain_run()).text) == ([], "")


def test_an_end_that_names_no_node_means_the_last_step():
    assert nodes(Trace(plain_run(), FORK, plain_end())) == [0, 3, 4]


@given(RUNS, trees())
def test_counts_node_and_text_are_those_of_the_path(run, steps):
    trace = Trace(run, steps)
    ended = replace(trace, end=end_of(run, trace.path(), "length"))
    assert (ended.text, nodes(ended)) == (trace.text, nodes(trace))
    assert (ended.end.new_tokens, ended.end.prompt_tokens) == (len(trace.path()), len(run.prompt_tokens))


def test_text_held_back_till_the_end_is_part_of_the_text():
    end = end_of(plain_run(), FORK[:2], "length", " w0 w1 END?")
    assert Trace(plain_run(), FORK[:2], end).text == " w0 w1 END?"


def test_the_speed_of_decoding_leaves_the_prefill_out():
    slow = replace(FORK[0], timing=replace(FORK[0].timing, forward_s=3.0, sample_s=0.5, total_s=4.0))
    end = end_of(plain_run(), [slow, *FORK[1:3]], "length")
    assert end.ttft_s == 3.5
    assert end.decode_tokens_per_s == pytest.approx(2 / (2 * 0.06))
    assert end_of(plain_run(), [slow], "length").decode_tokens_per_s is None
    assert end_of(plain_run(), [], "length").ttft_s is None


def test_only_a_stop_token_is_a_stop_token():
    token = FORK[1].token_id
    assert end_of(plain_run(), FORK[:2], "stop").stop_token_id == token
    assert end_of(plain_run(), FORK[:2], "stop", stop_string="END").stop_token_id is None
    assert end_of(plain_run(), FORK[:2], "length").stop_token_id is None


def stopped_by(*guards: tuple[str, str], token: int = 7) -> Step:
    """A step after which guards acted: (guard, action)."""
    acted = tuple(replace(plain_intervention(action), guard=guard) for guard, action in guards)
    return replace(FORK[1], token_id=token, interventions=acted)


def test_the_guard_that_ended_a_run_is_the_first_that_stopped_it_at_its_last_step(tmp_path):
    last = stopped_by(("entropy", "warn"), ("loop", "stop"), ("high_entropy", "stop"))
    end = end_of(plain_run(), [FORK[0], last], "stop")
    assert (end.stop_guard, end.stop_token_id) == ("loop", None)
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        for step in (FORK[0], last):
            writer.write(step)
        writer.finish(end)
    assert read_trace(tmp_path / "run").end == replace(end, trace=str(tmp_path / "run"))


@pytest.mark.parametrize("reason", ["length", "interrupted", "error"])
def test_a_guard_ended_only_what_was_stopped(reason):
    assert end_of(plain_run(), [FORK[0], stopped_by(("loop", "stop"))], reason).stop_guard is None


def test_a_guard_that_only_warned_ended_nothing_nor_did_one_before_the_last_step():
    for path in ([FORK[0], stopped_by(("loop", "warn"))], [stopped_by(("loop", "stop")), FORK[2]], []):
        assert end_of(plain_run(), path, "stop").stop_guard is None


def test_an_end_token_stays_one_where_a_guard_stopped_at_the_same_step():
    (end_token,) = plain_run().stop_ids
    end = end_of(plain_run(), [stopped_by(("loop", "stop"), token=end_token)], "stop")
    assert (end.stop_token_id, end.stop_guard) == (end_token, "loop")
