"""Guards on real runs of the starter: loops are ended or broken and the trace says so, good text is left alone."""

import json

import pytest

from decodescope import RunOptions, Session
from decodescope.trace.records import Trace
from repository import ROOT

RECORDED = json.loads((ROOT / "tests/data/guard_prompts.json").read_text(encoding="utf-8"))
STOPPED = [each for each in RECORDED["looping"] if each["stopped_at"]]
SOON = sorted(STOPPED, key=lambda each: each["stopped_at"])[:3]
ORDINARY = RECORDED["ordinary"][::13]


@pytest.fixture(scope="module")
def session(starter_path) -> Session:
    return Session.open(str(starter_path))


def traces(session: Session, prompts: list[dict], **options) -> list[Trace]:
    ready = [session.prompt(each["prompt"], chat=each.get("kind") != "raw") for each in prompts]
    live = session.start(ready, RunOptions(**options))
    for _ in live.steps():
        pass
    return live.traces


@pytest.mark.usefixtures("all_threads")
def test_a_guard_ends_real_loops_and_the_trace_says_where(session):
    most = SOON[-1]["stopped_at"] + 8
    for trace, recorded in zip(traces(session, SOON, max_new_tokens=most, guards=("loop",)), SOON, strict=True):
        (done,) = trace.path()[-1].interventions
        assert (trace.end.finish_reason, trace.end.stop_guard) == ("stop", "loop")
        assert (done.guard, done.action, done.measured >= done.threshold) == ("loop", "stop", True)
        assert abs(trace.end.new_tokens - 1 - recorded["stopped_at"]) <= 2  # recorded on another machine


@pytest.mark.usefixtures("all_threads")
def test_a_guard_breaks_a_real_loop_with_a_higher_temperature_and_takes_it_back(session):
    (trace,) = traces(session, SOON[:1], max_new_tokens=110, ignore_eos=True, guards=("loop=1.2,window=8",),
                      sampling={"seed": 3})  # fmt: skip
    raised, *later = [(step.step, done) for step in trace.path() for done in step.interventions]
    assert (raised[1].action, raised[1].temperature) == ("temperature", 1.2)
    assert later and (later[0][1].action, later[0][1].temperature) == ("release", 0.0)
    drawn = [step.step for step in trace.path() if step.mass_above is not None]
    assert drawn == list(range(raised[0] + 1, later[0][0] + 1))


@pytest.mark.usefixtures("all_threads")
def test_good_text_is_the_same_with_and_without_a_guard(session):
    plain, guarded = (traces(session, ORDINARY, max_new_tokens=32, guards=g) for g in ((), ("loop",)))
    assert [trace.token_ids for trace in guarded] == [trace.token_ids for trace in plain]
    assert not any(step.interventions for trace in guarded for step in trace.path())
