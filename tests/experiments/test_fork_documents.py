"""Reports of forks: figures are those of the trace, and a fresh prefill finds what is planted."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest

from decodescope import Session, read_trace
from decodescope.errors import FindingError, InputError
from decodescope.experiments.fork_check import verified
from decodescope.experiments.forks import Forking, ForkStudy, most_probable
from decodescope.trace.records import Trace
from decodescope.trace.store import TraceWriter
from tiny_model import IM_END, make_tiny_model

TOKENS = 6


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("forks") / "model")))


@pytest.fixture
def run(session, tmp_path) -> Trace:
    prompt = session.prompt("Spring is", chat=False)
    return session.run(prompt, max_new_tokens=TOKENS, ignore_eos=True, save=tmp_path / "run")


def forked(session: Session, run: Trace, plan: Forking):
    study = ForkStudy(session, run, plan)
    assert not study.started
    study.run()
    return study.report()


def test_the_figures_of_a_branch_are_those_of_its_steps(session, run):
    report = forked(session, run, Forking(2, ("q", 7), changes={"max_new_tokens": 3}))
    assert (report.step, report.past_tokens, report.settings) == (2, len(run.run.prompt_tokens) + 2, ())
    assert [branch.number for branch in report.branches] == [1, 2]
    assert [branch.tokens[0].text for branch in report.branches] == ["q", session.tokenizer.token_text(7)]
    for branch in report.branches:
        trace = run.branch(branch.number)
        path = trace.path()
        assert branch.token_ids == tuple(trace.token_ids[2:]) and len(branch.tokens) == 3
        assert [token.step for token in branch.tokens] == [2, 3, 4]
        assert [token.forced for token in branch.tokens] == [True, False, False]
        assert all(math.isclose(math.exp(token.logprob_nats), token.prob) for token in branch.tokens)
        assert math.isclose(branch.logprob_nats, sum(step.logprob_nats for step in path))
        assert math.isclose(branch.own_logprob_nats, sum(step.logprob_nats for step in path[2:]))
        assert branch.text == trace.text == "".join(step.delta_text for step in path[:2]) + branch.own_text
        assert branch.finish_reason == "length" and branch.parts_at == 2 and branch.verification is None
        assert branch.ttft_s == trace.end.ttft_s > 0
        assert branch.decode_tokens_per_s == trace.end.decode_tokens_per_s > 0
    assert report.trace == run.end.trace and report.seconds > 0


def test_the_runs_own_token_parts_nowhere_and_another_where_it_does(session, run):
    own = run.token_ids[1]
    report = forked(session, run, Forking(1, (own, own)))
    assert [branch.parts_at for branch in report.branches] == [None]  # the same token twice is one branch
    assert report.branches[0].token_ids == tuple(run.token_ids[1:])
    (ended,) = forked(session, run, Forking(3, (IM_END,), changes={"ignore_eos": False})).branches
    assert ended.finish_reason == "stop" and len(ended.tokens) == 1 and ended.own_text == ""
    assert ended.decode_tokens_per_s is None


def test_the_most_probable_branches_are_those_of_the_recorded_step(session, run):
    report = forked(session, run, Forking(3, branches=4, changes={"max_new_tokens": 2}))
    firsts = [branch.tokens[0] for branch in report.branches]
    recorded = run.path()[3].candidates[:4]
    assert [token.token_id for token in firsts] == [each.token_id for each in recorded]
    for token, each in zip(firsts, recorded, strict=True):
        assert math.isclose(token.prob, each.prob_raw, rel_tol=1e-4)
    assert [token.prob for token in firsts] == sorted((token.prob for token in firsts), reverse=True)


def test_only_ranked_candidates_count_as_recorded(run):
    step = run.path()[1]
    far = replace(step.candidates[9], rank=40)
    trace = replace(
        run, steps=[run.steps[0], replace(step, candidates=(*step.candidates[:2], far)), *run.steps[2:]]
    )
    assert most_probable(trace, 1, 2) == [each.token_id for each in step.candidates[:2]]
    for count in (0, 3, -1):
        with pytest.raises(InputError, match="from 1 to 2"):
            most_probable(trace, 1, count)
    with pytest.raises(InputError, match="right behind"):
        most_probable(trace, TOKENS, 1)


def test_the_past_counts_once_and_what_branches_add_is_theirs(session, run):
    one = run.run.kv_bytes_per_token
    session.run("forget the past", max_new_tokens=1)
    fresh = forked(session, run, Forking(4, branches=3))
    assert fresh.shared_bytes == fresh.past_tokens * one and fresh.added_bytes == 3 * 32 * one
    alone = forked(session, run, Forking(4, (65,)))
    assert alone.reused_tokens + 1 >= alone.past_tokens and alone.added_bytes == 32 * one
    assert (alone.past_tokens - 1) * one <= alone.shared_bytes <= alone.past_tokens * one
    session.run("forget the past", max_new_tokens=1)
    reread = forked(session, run, Forking(4, (65,)))
    assert reread.reused_tokens == 0 and reread.shared_bytes == reread.past_tokens * one
    assert reread.added_bytes == (256 - reread.past_tokens) * one
    uncached = forked(session, run, Forking(4, branches=2, changes={"use_cache": False}))
    assert uncached.shared_bytes == uncached.added_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_branch_agrees_with_a_fresh_prefill(session, run, dtype):
    reader = session if dtype == "float32" else Session.open(str(session.files.path), dtype=dtype)
    for step in (0, 3, TOKENS):
        plan = Forking(step, (65, 66, 200), changes={"max_new_tokens": 40, "temperature": 1.0}, verify=True)
        for branch in forked(reader, run, plan).branches:
            check = branch.verification
            assert check.agrees and len(check.differences) == 40 and check.compared >= 40 * 50
            assert check.largest_difference == max(check.differences) <= check.tolerance
            assert check.largest_difference < (5e-5 if dtype == "float32" else 0.5)
            assert dtype == "bfloat16" or check.best_differs_at == ()


def test_a_prefill_in_parts_is_compared_with_the_right_steps(session):
    run = session.run(session.prompt("x" * 300, chat=False), max_new_tokens=200, ignore_eos=True)
    check = verified(session.model, run, 0)
    assert check.agrees and len(check.differences) == 200 and check.largest_difference < 5e-5


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_a_wrong_logit_is_found_at_its_step(session, run, off):
    step = run.path()[4]
    wrong = replace(step.candidates[5], logit=step.candidates[5].logit + off)
    steps = [*run.steps]
    steps[4] = replace(step, candidates=(*step.candidates[:5], wrong, *step.candidates[6:]))
    check = verified(session.model, replace(run, steps=steps), 2)
    assert not check.agrees and check.best_differs_at == ()
    assert math.isnan(off) or check.differences.index(check.largest_difference) == 2


def test_other_weights_are_found(session, run):
    spoilt = copy.deepcopy(session.model)
    spoilt.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    assert not verified(spoilt, run, 0).agrees


def test_a_branch_without_tokens_of_its_own_agrees_with_anything(session, run):
    check = verified(session.model, run, TOKENS)
    assert (check.compared, check.differences, check.agrees) == (0, (), True)


def test_what_stops_the_forks_leaves_a_report_of_how_far_they_came(session, run):
    study = ForkStudy(session, run, Forking(2, branches=3))
    embeddings = session.model.model.embed_tokens.weight
    kept = embeddings.clone()
    embeddings[study._starts[1][0]] = float("nan")  # the second branch breaks behind its first token
    try:
        with pytest.raises(FindingError):
            study.run()
    finally:
        embeddings.copy_(kept)
    report = study.report()
    assert [branch.finish_reason for branch in report.branches] == ["error"] * 3
    assert all(len(branch.tokens) >= 1 and branch.error for branch in report.branches)
    saved = read_trace(Path(run.end.trace))
    assert [branch.end.finish_reason for branch in saved.branches] == ["error"] * 3


class Stopping(ForkStudy):
    """Ctrl-C between two steps, while the study looks at the cache."""

    def _measure(self, live) -> None:
        super()._measure(live)
        if len(live.traces[0].steps) >= TOKENS + 5:
            raise KeyboardInterrupt


def test_an_interrupt_between_two_steps_ends_every_branch(session, run):
    study = Stopping(session, run, Forking(2, branches=3))
    with pytest.raises(KeyboardInterrupt):
        study.run()
    report = study.report()
    assert [branch.finish_reason for branch in report.branches] == ["interrupted"] * 3
    assert [len(branch.tokens) for branch in report.branches] == [2, 2, 1]
    TraceWriter.reopen(Path(run.end.trace)).close()  # nobody has it any more


def test_tokens_and_branches_exclude_each_other():
    with pytest.raises(InputError, match="one of the two"):
        Forking(1, ("a",), branches=2)
