"""Guards on real runs of the starter: loops are ended or broken and the trace says so, good text is left alone."""

import json

import pytest

from decodescope import RunOptions, Session
from decodescope.forking import forked_options
from decodescope.options import changed
from decodescope.trace.records import Trace
from repository import ROOT
from tiny_model import make_tiny_model

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
    # Another processor may round its way into the loop some tokens later than the one that was recorded.
    most = SOON[-1]["stopped_at"] + 40
    for trace in traces(session, SOON, max_new_tokens=most, guards=("loop",)):
        (done,) = trace.path()[-1].interventions
        assert (trace.end.finish_reason, trace.end.stop_guard) == ("stop", "loop")
        assert (done.guard, done.action, done.measured >= done.threshold) == ("loop", "stop", True)
        assert not any(step.interventions for step in trace.path()[:-1])


@pytest.mark.usefixtures("all_threads")
def test_a_guard_breaks_a_real_loop_with_a_higher_temperature_and_takes_it_back(session):
    (trace,) = traces(session, SOON[:1], max_new_tokens=110, ignore_eos=True, guards=("loop=1.2,window=8",),
                      sampling={"seed": 3})  # fmt: skip
    acted = [(step.step, done) for step in trace.path() for done in step.interventions]
    (raised, first), (released, second) = acted[:2]
    assert (first.action, first.temperature) == ("temperature", 1.2)
    assert (second.action, second.temperature) == ("release", 0.0)
    drawn = [step.mass_above is not None for step in trace.path()]
    assert drawn[: released + 1] == [False] * (raised + 1) + [True] * (released - raised)
    assert not any(drawn[released + 1 : released + 2])


@pytest.mark.usefixtures("all_threads")
def test_good_text_is_the_same_with_and_without_a_guard(session):
    plain, guarded = (traces(session, ORDINARY, max_new_tokens=32, guards=g) for g in ((), ("loop",)))
    assert [trace.token_ids for trace in guarded] == [trace.token_ids for trace in plain]
    assert not any(step.interventions for trace in guarded for step in trace.path())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("guarded") / "tiny")))


def test_a_step_gone_back_to_is_chosen_at_the_temperature_it_had(tiny):
    options = RunOptions(max_new_tokens=8, ignore_eos=True, guards=("entropy=50:1.2,window=3",))
    live = tiny.start([tiny.prompt("Hello", chat=False)], options)
    steps = live.steps()
    raised = next(step for _, step in steps if step.interventions)
    next(steps)
    assert live.back() == raised
    other = live.replace(raised.candidates[1].token_id)
    assert (other.step, other.stages, other.interventions) == (raised.step, (), raised.interventions)
    assert [stage.settings for stage in next(steps)[1].stages] == [{"temperature": 1.2}]


def test_a_fork_behind_a_guards_stop_goes_on_after_its_first_token_is_changed(tiny):
    guards = ("entropy=50:stop,window=3",)
    trace = tiny.run(tiny.prompt("Hello", chat=False), max_new_tokens=8, ignore_eos=True, guards=guards)
    assert (trace.end.new_tokens, trace.end.stop_guard) == (3, "entropy")
    live = tiny.grow(trace, 3, [()], changed(forked_options(trace, 3), {"max_new_tokens": 4}))
    steps = live.steps()
    _, first = next(steps)
    live.replace(first.candidates[1].token_id)
    assert len(list(steps)) == 3
    assert live.traces[0].end.finish_reason == "length"


def test_a_greedy_run_that_a_guard_made_draw_tells_its_seed_and_can_be_repeated_and_forked(tiny):
    options = {"max_new_tokens": 12, "ignore_eos": True, "guards": ("entropy=50:1.2,window=2",)}
    trace = tiny.run(tiny.prompt("Hello", chat=False), **options)
    seed = trace.run.sampling["seed"]
    assert seed is not None
    again = tiny.run(tiny.prompt("Hello", chat=False), seed=seed, **options)
    assert (again.token_ids, again.run.notes) == (trace.token_ids, trace.run.notes)
    assert all(tiny.fork(trace, step).token_ids == trace.token_ids for step in (0, 1, 5))
    warned = tiny.run(tiny.prompt("Hello", chat=False), **{**options, "guards": ("loop=warn",)})
    assert warned.run.sampling["seed"] is None
