"""Forks on tiny models of every family: each is the straight run with its token, and leaves its parent alone."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodescope import RunOptions, Session, read_trace
from decodescope.errors import InputError
from decodescope.forking import forked_options
from decodescope.model.kv_cache import KVCache
from decodescope.trace.records import Step, Trace
from decodescope.trace.store import TraceWriter
from families import FAMILIES, Family
from tiny_model import IM_END, make_tiny_model, write_tokenizer

PROMPT = "Once upon a time"
TOKENS = 8
ROUNDING = 2e-5  # logits of about 3, another number of rows in a product


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("forks") / "model")


@pytest.fixture
def session(folder) -> Session:
    return Session.open(str(folder))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> dict[str, str]:
    """Every family with a tokenizer."""
    root = tmp_path_factory.mktemp("spoken")
    for family in FAMILIES:
        Family(family.name, family.architecture, {**family.settings, "vocab_size": 260}).save(root / family.name)
        write_tokenizer(root / family.name)
    return {family.name: str(root / family.name) for family in FAMILIES}


def made(session: Session, **changes) -> Trace:
    """A run of the prompt."""
    options = {"max_new_tokens": TOKENS, "ignore_eos": True, **changes}
    return session.run(session.prompt(PROMPT, chat=False), **options)


def straight(session: Session, forced: list[int], **changes) -> Trace:
    """The run whose first tokens are laid down, with everything computed for it alone."""
    sampling = {name: changes.pop(name) for name in ("temperature", "seed", "top_k") if name in changes}
    options = RunOptions(sampling=sampling, **{"max_new_tokens": TOKENS, "ignore_eos": True, **changes})
    live = session.start([session.prompt(PROMPT, chat=False)], options)
    live.force(forced)
    for _ in live.steps():
        pass
    return live.traces[0]


def logits(path: list[Step]) -> list[dict[int, float]]:
    return [{each.token_id: each.logit for each in step.candidates} for step in path]


def furthest(here: list[Step], there: list[Step]) -> float:
    """The largest difference of logits between two paths; infinite where they chose different tokens."""
    if [step.token_id for step in here] != [step.token_id for step in there]:
        return float("inf")
    pairs = zip(logits(here), logits(there), strict=True)
    return max(abs(one[i] - two[i]) for one, two in pairs for i in one.keys() & two.keys())


def another(step: Step, rank: int = 2) -> int:
    """A token that was not chosen."""
    return next(each.token_id for each in step.candidates[rank - 1 :] if each.token_id != step.token_id)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_fork_at_any_step_is_the_straight_run_with_its_token(spoken, name):
    session, beside = Session.open(spoken[name]), Session.open(spoken[name])
    run = made(session)
    own = run.token_ids
    for step in range(TOKENS - 1, -1, -1):  # the cache still holds what each needs
        token_id = another(run.path()[step])
        fork = run.fork(step, token_id)
        there = straight(beside, [*own[:step], token_id])
        assert [each.node for each in fork.path()[:step]] == [each.node for each in run.path()[:step]]
        # The last token is fed again: behind the prompt alone where the straight run read all of that at once.
        allowed = 0.0 if step else ROUNDING
        assert furthest(fork.path(), there.path()) <= allowed, step
        assert fork.text == there.text and fork.end.new_tokens == TOKENS
    assert run.token_ids == own


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_fork_after_a_fresh_prefill_and_several_at_once_are_straight_runs_within_rounding(spoken, name):
    session = Session.open(spoken[name])
    run = made(session)
    fresh = Session.open(spoken[name])
    for step in (0, 3, TOKENS):
        tokens = [each.token_id for each in run.path()[min(step, TOKENS - 1)].candidates[:3]]
        options = replace(forked_options(run, step), max_new_tokens=4)
        live = fresh.grow(run, step, [[token] for token in tokens], options)
        for _ in live.steps():
            pass
        for token, fork in zip(tokens, live.traces, strict=True):
            there = straight(session, [*run.token_ids[:step], token], max_new_tokens=step + 4)
            assert furthest(fork.path(), there.path()) < ROUNDING
        assert live.cache.shared_bytes and live.cache.length == len(run.run.prompt_tokens) + step + 3


def test_a_fork_with_the_runs_own_token_or_none_is_the_run_again(session):
    run = made(session)
    for step in (TOKENS - 1, 4, 1):
        for token in (run.token_ids[step], None):
            fork = run.fork(step, token)
            assert furthest(fork.path(), run.path()) == 0 and fork.text == run.text
            assert fork.path()[step].forced == (token is not None)
    assert [branch.step for branch in run.branches] == [7, 7, 4, 4, 1, 1]


def test_the_draws_of_a_fork_go_on_as_the_straight_runs(session, folder):
    sampling = {"temperature": 1.3, "seed": 11}
    run = made(session, **sampling)
    beside = Session.open(str(folder))
    for step in (6, 3, 1):
        assert run.fork(step).token_ids == run.token_ids
        token_id = another(run.path()[step])
        there = straight(beside, [*run.token_ids[:step], token_id], **sampling)
        assert run.fork(step, token_id).token_ids == there.token_ids
    longer = straight(beside, [], max_new_tokens=TOKENS + 6, **sampling)
    assert run.fork(TOKENS, max_new_tokens=6).token_ids == longer.token_ids
    other = run.fork(1, seed=12, max_new_tokens=16)
    assert other.token_ids != run.token_ids
    assert [(each.name, each.value) for each in run.branches[-1].settings] == [("seed", 12)]


def test_forks_of_forks_know_what_differs_from_the_run_and_go_on_with_their_draws(session):
    run = made(session, max_new_tokens=5)
    warm = run.fork(3, temperature=1.2, max_new_tokens=9)
    settings = {each.name: each.value for each in run.branches[0].settings}
    assert settings.keys() == {"temperature", "seed"} and settings["temperature"] == 1.2
    assert warm.root is run.run
    for step in (9, 6, 4):
        again = warm.fork(step)
        assert again.token_ids == warm.token_ids[: len(again.token_ids)] and len(again.token_ids) > step
        assert {each.name: each.value for each in again.branches[-1].settings} == settings
    other = warm.fork(6, another(warm.path()[6]))
    assert other.token_ids[:6] == warm.token_ids[:6] and other.token_ids != warm.token_ids
    assert run.branches[-1].step == 6 and run.branches[-1].end is other.end
    cold = warm.fork(7, temperature=0.0, max_new_tokens=2)
    assert all(step.mass_above is None for step in cold.path()[7:])
    assert "temperature" not in {each.name for each in run.branches[-1].settings}
    assert len(run.path()) == 5 and len(run.branches) == 6


def test_a_fork_of_a_guarded_run_goes_on_at_the_temperature_and_with_the_draws_of_the_run(session):
    run = made(session, temperature=1.3, seed=4, guards=("high_entropy=0.5:0,window=2",), max_new_tokens=12)
    acted = [step.step for step in run.path() if step.interventions]
    assert acted and any(step.mass_above is None for step in run.path())  # greedy for a while
    for step in range(11, 0, -1):
        assert run.fork(step).token_ids == run.token_ids


def test_a_drawn_seed_is_told_so_that_a_fork_can_be_repeated(session):
    run = made(session)
    fork = run.fork(2, temperature=1.5)
    (seed,) = [each.value for each in run.branches[0].settings if each.name == "seed"]
    assert run.fork(2, temperature=1.5, seed=seed).token_ids == fork.token_ids
    assert {each.name: each.value for each in fork.run.settings}["seed"] == seed


def test_a_branch_is_read_with_its_settings(session, tmp_path):
    run = made(session, save=tmp_path / "run")
    fork = run.fork(2, temperature=0.5, seed=3, guards=("loop=warn",))
    for trace in (read_trace(tmp_path / "run"), run):
        branch = trace.branch(1)
        assert branch.path() == fork.path() and branch.text == fork.text
        values = {each.name: each.value for each in branch.run.settings}
        assert (values["temperature"], values["seed"], values["guards"]) == (0.5, 3, "loop=warn")
        assert branch.root == run.run and branch.run.dtype == run.run.dtype
        for number in (0, 2, -1):
            with pytest.raises(InputError, match=f"no branch {number}"):
                trace.branch(number)


def test_a_fork_without_the_runs_guards_says_so(session, tmp_path):
    run = made(session, save=tmp_path / "run", guards=("loop=warn",))
    run.fork(2, guards=())
    (branch,) = read_trace(tmp_path / "run").branches
    assert [(each.name, each.value) for each in branch.settings] == [("guards", "")]
    again = session.fork(read_trace(tmp_path / "run").branch(1), 3)
    assert not [each for each in again.run.settings if each.name == "guards"]


def test_a_fork_in_another_dtype_says_so(session, folder, tmp_path):
    made(session, save=tmp_path / "run")
    coarse = Session.open(str(folder), dtype="bfloat16")
    fork = coarse.fork(read_trace(tmp_path / "run"), 4)
    saved = read_trace(tmp_path / "run")
    assert [(each.name, each.value) for each in saved.branches[0].settings] == [("dtype", "bfloat16")]
    assert saved.run.dtype == "float32" and saved.branch(1).run.dtype == fork.run.dtype == "bfloat16"
    assert coarse.fork(saved.branch(1), 5).run.dtype == "bfloat16"


def test_a_run_read_from_disk_is_forked_as_in_the_session_that_made_it(session, folder, tmp_path):
    run = made(session, save=tmp_path / "run", temperature=0.9, seed=5)
    token_id = another(run.path()[3])
    here = run.fork(3, token_id)
    there = Session.open(str(folder)).fork(read_trace(tmp_path / "run"), 3, token_id)
    assert furthest(here.path(), there.path()) < ROUNDING
    saved = read_trace(tmp_path / "run")
    assert saved.path() == run.path() and replace(saved.end, peak_rss_bytes=run.end.peak_rss_bytes) == run.end
    assert [branch.step for branch in saved.branches] == [3, 3]
    assert [saved.branch(n).token_ids for n in (1, 2)] == [here.token_ids, there.token_ids]


def held_bytes() -> int:
    """Bytes of all keys and values that anything still looks at."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() == 4]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def caches() -> int:
    gc.collect()
    return sum(type(each) is KVCache for each in gc.get_objects())


def test_a_hundred_forks_leave_the_run_its_cache_and_its_folder_alone_and_cost_what_they_add(session, tmp_path):
    run = made(session, save=tmp_path / "run")
    before = read_trace(tmp_path / "run")
    path, end, text = list(run.path()), run.end, run.text
    past = session._newest.past().cache
    kept = [[tensor.clone() for tensor in past.layer(layer)] for layer in range(2)]
    position_bytes = past.position_bytes
    resting, caches_then = held_bytes(), caches()
    for number in range(100):
        step = 1 + number % 5
        token_id = run.path()[step].candidates[number // 5].token_id
        live = session.grow(run, step, [[token_id]], replace(forked_options(run, step), max_new_tokens=3))
        for _ in live.steps():
            pass
        shared = (len(run.run.prompt_tokens) + step - 1) * position_bytes
        assert live.cache.shared_bytes <= shared and live.cache.own_bytes == 32 * position_bytes
        assert live.cache.used_bytes == live.cache.length * position_bytes
    assert all(
        torch.equal(one, two)
        for layer in range(2)
        for one, two in zip(kept[layer], past.layer(layer), strict=True)
    )
    assert (run.path(), run.end, run.text) == (path, end, text)
    after = read_trace(tmp_path / "run")
    assert after.steps[: len(before.steps)] == before.steps and after.path() == before.path()
    assert after.end == before.end and len(after.branches) == len(run.branches) == 100
    del live
    assert (
        held_bytes() <= resting + 5 * 32 * position_bytes
    )  # the newest fork, and those at earlier steps it grew from
    del past
    made(session, max_new_tokens=1)
    assert held_bytes() <= resting and caches() == caches_then


def test_branches_of_a_batch_share_one_past_and_end_one_by_one(session, tmp_path):
    run = made(session, save=tmp_path / "run", ignore_eos=False)
    tokens = [IM_END, *(each.token_id for each in run.path()[2].candidates[:3] if each.token_id != IM_END)]
    live = session.grow(run, 2, [[token] for token in tokens], forked_options(run, 2))
    most = [0, 0]
    for _ in live.steps():
        most = [max(most[0], live.cache.shared_bytes), max(most[1], live.cache.own_bytes)]
    one = live.cache.position_bytes
    # A branch that ends with its first token adds nothing.
    assert most == [(len(run.run.prompt_tokens) + 2) * one, 32 * one * (len(tokens) - 1)]
    saved = read_trace(tmp_path / "run")
    assert saved.branches[0].end.finish_reason == "stop" and saved.branches[0].end.new_tokens == 3
    assert len(saved.branches) == len(tokens) and saved.path() == run.path()


def test_an_interrupted_batch_of_forks_keeps_every_branch(session, tmp_path):
    run = made(session, save=tmp_path / "run")
    tokens = [each.token_id for each in run.path()[2].candidates[:3]]
    live = session.grow(run, 2, [[token] for token in tokens], forked_options(run, 2))
    steps = live.steps()
    for _ in range(7):
        next(steps)
    steps.close()
    saved = read_trace(tmp_path / "run")
    assert [branch.end.finish_reason for branch in saved.branches] == ["interrupted"] * 3
    assert [branch.end.new_tokens for branch in saved.branches] == [5, 4, 4]
    TraceWriter.reopen(tmp_path / "run").close()  # nobody has it any more


def test_what_cannot_be_forked_is_said_in_one_sentence(session, tmp_path):
    run = made(session, save=tmp_path / "run")
    for step in (-1, TOKENS + 1, 10**9):
        with pytest.raises(InputError, match=f"no step {step} to fork at: give one from 0 to {TOKENS}"):
            run.fork(step)
    for token, words in (
        ("ab", r"2 tokens here: 'a' \(\d+\), 'b'"),
        ("", "empty"),
        (260, "0 to 259"),
        (-1, "0 to 259"),
    ):
        with pytest.raises(InputError, match=words):
            run.fork(1, token)
    with pytest.raises(InputError, match=r"Session\.fork"):
        read_trace(tmp_path / "run").fork(1)
    other = make_tiny_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(InputError, match="other weights"):
        Session.open(str(other)).fork(run, 1)
    with pytest.raises(InputError, match="Temperature"):
        run.fork(1, temperature=-1.0)
    with TraceWriter.reopen(tmp_path / "run"), pytest.raises(InputError, match="still being written"):
        run.fork(1)
    assert read_trace(tmp_path / "run").branches == []
