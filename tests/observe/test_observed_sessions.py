"""Looking inside a session's runs: what is saved, what going back does, and what is refused."""

from pathlib import Path

import pytest
import torch

from decodescope import RunOptions, Session
from decodescope.analysis.departure import first_departure
from decodescope.errors import FindingError, InputError
from decodescope.observe.recording import Recording, Watch
from decodescope.observe.selection import places
from decodescope.trace.saved import read_sites, read_trace, saved_tensors
from decodescope.trace.site_records import LayerCost, SiteSummary
from tiny_model import make_tiny_model

ALL = ("*",)
CONTEXT = 1536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT, num_hidden_layers=3)


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session.open(str(folder))


@pytest.fixture
def fresh(folder: Path) -> Session:
    """One whose weights may be spoilt."""
    return Session.open(str(folder))


def assert_alike(found: list[SiteSummary], expected: list[SiteSummary], tolerance: float) -> None:
    assert [(s.step, s.layer, s.site, s.shape) for s in found] == [
        (s.step, s.layer, s.site, s.shape) for s in expected
    ]
    departure, _ = first_departure(list(zip(found, expected, strict=True)), tolerance)
    assert departure is None


def test_the_readmes_example_runs(session):
    with session.observe(sites=["layers.*.resid_post", "layers.1.pattern"], steps=range(4)) as recording:
        trace = session.run("春天", max_new_tokens=8, ignore_eos=True)
    prompt = len(trace.run.prompt_tokens)
    assert recording["layers.1.pattern"][0].shape == (4, prompt, prompt)
    assert list(recording["layers.2.resid_post"]) == [0, 1, 2, 3]
    assert recording["layers.0.resid_post"][3].shape == (1, 32)
    assert trace.run.notes == ("note.observed",)


def test_a_run_that_is_looked_at_chooses_and_counts_the_same(session):
    options = RunOptions({"temperature": 1.0, "seed": 3}, max_new_tokens=12, ignore_eos=True)
    plain = session.run("Hi", options=options)
    with session.observe(ALL, summarise=ALL):
        seen = session.run("Hi", options=options)
    assert seen.token_ids == plain.token_ids
    assert [s.logprob_nats for s in seen.steps] == [s.logprob_nats for s in plain.steps]
    assert session.run("Hi", options=options).run.notes == plain.run.notes == ()


def test_a_long_prompt_is_summed_up_as_one_pass(session):
    """1,200 tokens are read in three passes; the same positions in one, without cache."""
    prompt = session.prompt("春" * 400, chat=False)
    assert len(prompt.ids) == 1200
    found = []
    for use_cache in (True, False):
        with session.observe(summarise=ALL) as recording:
            session.run(prompt, max_new_tokens=1, use_cache=use_cache)
        found.append(recording.summaries)
        assert recording.reconstruction_error < 1e-5
    assert found[0][1].shape == (1, 1200, 32)
    assert_alike(*found, tolerance=1e-5)


def test_every_logit_changes_the_last_sites_alone(session):
    with session.observe(summarise=ALL) as last:
        session.run("Hi", max_new_tokens=2)
    with session.observe(summarise=ALL) as every:
        trace = session.run("Hi", max_new_tokens=2, every_logit=True)
    prompt = len(trace.run.prompt_tokens)
    for one, all_ in zip(last.summaries, every.summaries, strict=True):
        if one.site in ("final_norm", "logits") and one.step == 0:
            assert (one.shape[1], all_.shape[1]) == (1, prompt)
        else:
            assert one == all_


# --- on disk


def test_what_is_saved_is_what_is_in_memory(session, tmp_path):
    run = tmp_path / "run"
    with session.observe(ALL, summarise=ALL) as memory:
        session.run("Hi", max_new_tokens=3, ignore_eos=True)
    with session.observe(ALL, summarise=ALL) as saved:
        trace = session.run("Hi", max_new_tokens=3, ignore_eos=True, save=run)
    assert read_sites(run) == saved.summaries == memory.summaries
    entries = saved_tensors(run)
    assert sum(entry.bytes for entry in entries) == memory.kept.bytes == saved.kept.bytes
    assert {entry.node for entry in entries} == {step.node for step in trace.steps}
    for site, layer in places(session.model.config):
        name = site if layer is None else f"layers.{layer}.{site}"
        assert list(saved[name]) == list(memory[name]) == [0, 1, 2]
        assert all(torch.equal(saved[name][step], memory[name][step]) for step in range(3))


def test_the_budget_counts_what_lies_on_disk_too(session, tmp_path):
    with session.observe(["resid_post"], budget_bytes=20_000) as recording:
        session.run("Hi", max_new_tokens=60, ignore_eos=True, save=tmp_path / "run")
    written = sum(entry.bytes for entry in saved_tensors(tmp_path / "run"))
    assert 19_000 < written == recording.kept.bytes <= 20_000
    assert recording.dropped and {gone.site for gone in recording.dropped} == {"resid_post"}


# --- going back


def live(session: Session, **options):
    return session.start([session.prompt("Hi")], RunOptions(max_new_tokens=6, ignore_eos=True, **options))


def straight(session: Session, ids: list[int]) -> Recording:
    """The same tokens forced one by one, never going back."""
    with session.observe(ALL, summarise=ALL) as recording:
        run = live(session)
        for (_, step), token_id in zip(run.steps(), ids, strict=True):
            if step.token_id != token_id:
                run.replace(token_id)
    return recording


def test_after_going_back_the_recording_is_that_of_the_branch(session, tmp_path):
    folder = tmp_path / "run"
    with session.watching(Watch(ALL, ALL, clock=True)) as recording:
        run = live(session, save=folder)
        steps = run.steps()
        for _ in range(4):
            next(steps)
        run.back()
        assert max(each.step for each in recording.summaries) == 2
        run.back()
        assert max(each.step for each in recording.summaries) == max(recording["embed"]) == 1
        assert max(cost.step for cost in recording.layer_costs) == 1
        run.replace(7)
        for _ in steps:
            pass
    ids = run.traces[0].token_ids
    assert len(ids) == 6 and ids[1] == 7
    expected = straight(session, ids)
    assert recording.summaries == expected.summaries == read_sites(folder)
    for site, layer in places(session.model.config):
        name = site if layer is None else f"layers.{layer}.{site}"
        assert all(torch.equal(recording[name][step], expected[name][step]) for step in range(6))
    assert [cost.step for cost in recording.layer_costs] == [step for step in range(6) for _ in range(4)]


@pytest.mark.parametrize("backs", [1, 2, 3, 5])
def test_a_run_that_ends_after_going_back_tells_of_its_branch_alone(session, tmp_path, backs):
    with session.observe(summarise=["layers.1.up"]) as recording:
        run = live(session, save=tmp_path / "run")
        steps = run.steps()
        for _ in range(4):
            next(steps)
        for _ in range(backs):
            run.back()
        run.finish("interrupted")
    kept = max(4 - backs, 1)
    assert len(read_trace(tmp_path / "run").path()) == kept
    assert [each.step for each in recording.summaries] == list(range(kept))
    assert read_sites(tmp_path / "run") == recording.summaries


def test_a_replaced_token_keeps_what_was_seen_of_its_pass(session, tmp_path):
    with session.observe(summarise=["layers.1.up"]) as recording:
        run = live(session, save=tmp_path / "run")
        for _, step in run.steps():
            run.replace((step.token_id + 1) % 100)
    assert len(recording.summaries) == 6
    assert read_sites(tmp_path / "run") == recording.summaries


# --- what is no number


def spoil(session: Session, layer: int, part: str, row: int, value: float) -> None:
    linear = getattr(session.model.model.layers[layer].mlp, part)
    weight = linear.weight.clone()
    weight[row] = value
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def test_the_first_nan_is_named_where_it_was_planted(fresh):
    spoil(fresh, 1, "up_proj", 5, torch.nan)
    with fresh.observe(["layers.1.mlp_norm"], summarise=ALL) as recording, pytest.raises(FindingError):
        fresh.run("Hi", max_new_tokens=2)
    first = recording.first_nonfinite
    assert (first.step, first.layer, first.site, first.position, first.index) == (0, 1, "up", 0, (5,))
    assert (first.value, first.source, first.dtype) == ("nan", "mlp_norm", "float32")
    assert first.before == float(recording["layers.1.mlp_norm"][0][0].abs().max())
    counts = {(each.layer, each.site): each.nonfinite for each in recording.summaries}
    tokens = recording["layers.1.mlp_norm"][0].shape[0]
    assert counts[1, "mlp_norm"] == counts[0, "resid_post"] == 0
    assert counts[1, "up"] == counts[1, "act"] == tokens
    assert counts[1, "mlp_out"] == 32 * tokens


def test_the_first_nan_of_a_later_chunk_is_named_by_its_position(fresh):
    """A token that stands at one place only, behind the first chunk, has a broken embedding."""
    text = "a" * 700 + "z" + "a" * 50
    prompt = fresh.prompt(text, chat=False)
    embedding = fresh.model.model.embed_tokens
    weight = embedding.weight.clone()
    weight[prompt.ids[700], 3] = -torch.inf
    embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
    with fresh.observe(summarise=ALL) as recording, pytest.raises(FindingError):
        fresh.run(prompt, max_new_tokens=1)
    first = recording.first_nonfinite
    assert (first.layer, first.site, first.position, first.index, first.value) == (
        None,
        "embed",
        700,
        (3,),
        "-inf",
    )
    assert first.source is None and first.before is None


def test_an_overflow_is_named_with_the_value_before_it_and_the_limit(folder):
    session = Session.open(str(folder), dtype="bfloat16")
    mlp = session.model.model.layers[1].mlp
    for part in ("gate_proj", "up_proj"):
        linear = getattr(mlp, part)
        linear.weight = torch.nn.Parameter(linear.weight * 1e20, requires_grad=False)
    watch = Watch(["layers.1.act", "layers.1.up"], ALL)
    with session.watching(watch) as recording, pytest.raises(FindingError):
        session.run("Hi", max_new_tokens=1)
    first = recording.first_nonfinite
    assert (first.layer, first.site, first.dtype, first.limit) == (
        1,
        "act",
        "bfloat16",
        torch.finfo(torch.bfloat16).max,
    )
    act, up = recording["layers.1.act"][0], recording["layers.1.up"][0]
    position, unit = torch.nonzero(~act.isfinite())[0].tolist()
    assert (first.position, first.index, first.value) == (position, (unit,), str(float(act[position, unit])))
    assert (first.source, first.before) == ("up", float(up[position].abs().max()))
    assert up.isfinite().all()
    (summary,) = [each for each in recording.summaries if (each.layer, each.site) == (1, "act")]
    assert summary.nonfinite == int((~act.isfinite()).sum()) and summary.l2 == torch.inf


def test_a_pass_after_which_nothing_could_be_chosen_is_saved_too(fresh, tmp_path):
    spoil(fresh, 2, "gate_proj", 0, torch.inf)
    with fresh.observe(summarise=["layers.*.gate"]) as recording, pytest.raises(FindingError):
        fresh.run("Hi", max_new_tokens=2, save=tmp_path / "run")
    assert read_trace(tmp_path / "run").steps == []
    assert repr(read_sites(tmp_path / "run")) == repr(recording.summaries)  # NaN equals itself there
    assert [each.nonfinite > 0 for each in recording.summaries] == [False, False, True]


@pytest.mark.parametrize(("back_to", "known"), [(2, True), (1, False), (0, False)])
def test_what_was_no_number_on_a_branch_that_was_left_is_forgotten(session, back_to, known):
    recording = Recording(session.model.config, Watch(summarise=["embed"]))
    for step, value in enumerate([0.0, torch.nan, 0.0]):
        recording.begin(step, step, step + 1)
        recording.receive("embed", None, torch.full((1, 1, 32), value))
        recording.end()
    assert recording.first_nonfinite.step == 1
    recording.forget_from(back_to)
    assert [each.step for each in recording.summaries] == list(range(back_to))
    assert (recording.first_nonfinite is not None) == known


# --- time and memory of layers


def test_a_clock_tells_of_every_layer_and_the_end(session):
    with session.watching(Watch(summarise=["layers.1.z"], clock=True)) as recording:
        session.run("Hi", max_new_tokens=2, ignore_eos=True)
    assert all(isinstance(cost, LayerCost) for cost in recording.layer_costs)
    assert [(c.step, c.layer) for c in recording.layer_costs] == [
        (s, i) for s in range(2) for i in (0, 1, 2, None)
    ]
    assert all(cost.seconds > 0 and cost.memory.rss_bytes > 0 for cost in recording.layer_costs)
    assert [(each.layer, each.site) for each in recording.summaries] == [(1, "z")] * 2


# --- what is refused


def test_one_recording_at_a_time_of_one_run_of_one_sequence(session):
    with session.observe(["embed"]):
        with pytest.raises(InputError, match="open already"), session.observe(["embed"]):
            pass
        with pytest.raises(InputError, match="one sequence at a time, and this run has 2"):
            session.start([session.prompt("a"), session.prompt("b")], RunOptions())
        session.run("Hi", max_new_tokens=1)
        with pytest.raises(InputError, match="already holds a run"):
            session.run("Hi", max_new_tokens=1)
    session.run("Hi", max_new_tokens=1)
    with session.observe(["embed"]) as recording:
        session.run("Hi", max_new_tokens=1)
    assert len(recording["embed"]) == 1


def test_a_fault_inside_leaves_the_session_free(session):
    with pytest.raises(ZeroDivisionError), session.observe(["embed"]):
        raise ZeroDivisionError
    with session.observe(["embed"]) as recording:
        session.run("Hi", max_new_tokens=1)
    assert recording.taken


@pytest.mark.parametrize("pattern", ["layers.9.q", "residual", "layers.1", "Q", "layers.-4.q", ""])
def test_a_pattern_that_names_nothing_is_refused(session, pattern):
    with pytest.raises(InputError, match="No site is called"), session.observe([pattern]):
        pass


def test_a_single_pattern_may_be_given_as_it_is(session):
    with session.observe("layers.1.q") as recording:
        session.run("Hi", max_new_tokens=1)
    assert recording.kept.places() == {("q", 1)}
