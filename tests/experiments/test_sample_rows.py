"""Rows side by side: each as if run alone; where and why they part; what is said of a row and of a setting."""

from itertools import islice
from statistics import fmean, pstdev

import pytest
import torch

from decodescope import Session
from decodescope.errors import InputError
from decodescope.experiments.passes import counted
from decodescope.experiments.sample import ROWS_AT_ONCE, SideBySide
from decodescope.experiments.sample_grid import Cell, Grid, parse_grid
from decodescope.experiments.sample_parting import Chosen, Junction, Replay
from decodescope.experiments.sample_records import SampleReport
from decodescope.options import RunOptions
from decodescope.sampling.params import SamplingParams, resolve
from decodescope.sequences import common_length
from decodescope.trace.saved import read_trace
from tiny_model import make_tiny_model

PRESETS = "preset=greedy,checkpoint,checkpoint-greedy"


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("sample") / "tiny")))


def side_by_side(session: Session, grid: Grid, text: str = "Hello", **options) -> SampleReport:
    study = SideBySide(session, session.prompt(text, chat=False), grid, RunOptions(**options))
    for _ in study.steps():
        pass
    return study.report()


def alone(session: Session, row, text: str = "Hello", **options):
    """The same settings as a run of their own."""
    sampling = {**row.settings, "seed": row.seed}
    return session.run(session.prompt(text, chat=False), options=RunOptions(sampling, **options))


MIXED = (
    PRESETS, "temperature=0.5,1.2", "top_k=0,7", "top_p=0.9", "repetition_penalty=1.0,1.3",
)  # fmt: skip


def test_every_row_is_the_row_run_alone(session):
    report = side_by_side(session, parse_grid(MIXED, "42,7"), max_new_tokens=24)
    assert len(report.rows) == 1 + 2 + 1 + 8 * 2 > ROWS_AT_ONCE
    for row in report.rows:
        trace = alone(session, row, max_new_tokens=24)
        assert list(row.token_ids) == trace.token_ids, row.name
        assert (row.text, row.finish_reason) == (trace.text, trace.end.finish_reason)
    assert report.complete


def test_every_row_of_a_real_model_is_the_row_run_alone(small_path, all_threads):
    session = Session.open(str(small_path))
    knobs = ("sampler=hf,vllm,llamacpp", "temperature=0.9", "top_p=0.8", "min_p=0.02", "repetition_penalty=1.2")
    report = side_by_side(session, parse_grid(("preset=greedy", *knobs), "7"), "The sea", max_new_tokens=8)
    assert len(report.rows) == 4 and len({row.token_ids for row in report.rows}) > 1
    for row in report.rows:
        assert list(row.token_ids) == alone(session, row, "The sea", max_new_tokens=8).token_ids, row.name


def test_greedy_by_the_checkpoint_parts_from_plain_argmax_where_its_penalty_says(session):
    report = side_by_side(session, parse_grid([PRESETS]), max_new_tokens=24, ignore_eos=True)
    plain, _, penalised = report.rows
    ids = [plain.token_ids, penalised.token_ids]
    assert penalised.parts_at == next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    parting = penalised.parting
    assert (parting.cause, parting.stage) == ("lowered", "repetition_penalty")
    assert parting.repaired_by == ("repetition_penalty",)
    assert (parting.first_token_id, parting.token_id) == tuple(line[parting.step] for line in ids)
    assert parting.first_prob_raw > parting.prob_raw and parting.first_prob_here < parting.prob_here
    assert parting.first_prob_there == parting.first_prob_raw


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [((), (), 0), ((1,), (1,), 1), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((4,), (5,), 0)],
)
def test_two_sequences_part_at_their_first_difference(one, other, at):
    assert common_length(one, other) == at


def test_the_first_row_and_equal_rows_part_nowhere(session):
    report = side_by_side(session, parse_grid(["top_k=0,260", "temperature=0.8"], "5"), max_new_tokens=9)
    one, same = report.rows
    assert one.token_ids == same.token_ids
    assert one.parts_at is one.parting is same.parts_at is same.parting is None


# Probabilities 0.5, 0.3, 0.15, 0.05 of four tokens.
RAW = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def parting(first: tuple[int, dict], own: tuple[int, dict], past=(0, 1), by_hand=False):
    chosen = [Chosen(token, resolve(settings), by_hand) for token, settings in (first, own)]
    return Junction(RAW, (3,), past, Replay()).explain(*chosen)


def drawn(settings: dict, past=(0, 1)) -> int:
    return Replay().choose(RAW, (3,), past, resolve(settings)).token_id


def seed_for(token: int, settings: dict, but: int | None = None) -> int:
    """The first seed whose draw is this token."""
    return next(seed for seed in range(999) if seed != but and drawn({**settings, "seed": seed}) == token)


HOT = {"temperature": 1.0}


def test_a_token_that_a_stage_removed_is_named_with_the_stage():
    seed = seed_for(2, HOT)
    cut = {**HOT, "top_k": 2, "seed": seed}
    found = parting((2, {**HOT, "seed": seed}), (drawn(cut), cut))
    assert (found.cause, found.stage, found.repaired_by) == ("removed", "top_k", ("top_k",))
    assert found.first_prob_here == 0 and found.first_prob_there == pytest.approx(0.15)
    assert found.step == 2


def test_a_token_that_a_penalty_lowered_is_named_with_the_penalty():
    found = parting((0, {}), (1, {"presence_penalty": 1.0, "repetition_penalty": 1.0}), past=(0,))
    assert (found.cause, found.stage, found.repaired_by) == ("lowered", "presence_penalty", ("presence_penalty",))
    assert found.first_prob_raw == pytest.approx(0.5) and found.prob_raw == pytest.approx(0.3)
    lowered = 0.5 * 2.718281828**-1
    assert found.first_prob_here == pytest.approx(lowered / (lowered + 0.5), rel=1e-5)


def test_two_draws_with_other_seeds_differ_by_the_seed():
    one = seed_for(0, HOT)
    other = seed_for(1, HOT)
    found = parting((0, {**HOT, "seed": one}), (1, {**HOT, "seed": other}))
    assert (found.cause, found.stage, found.repaired_by) == ("other_seed", None, ("seed",))


def test_two_draws_with_one_seed_differ_by_their_probabilities():
    cold, hot = {"temperature": 0.3}, {"temperature": 3.0}
    seed = next(s for s in range(999) if drawn({**cold, "seed": s}) == 0 and drawn({**hot, "seed": s}) == 3)
    found = parting((0, {**cold, "seed": seed}), (3, {**hot, "seed": seed}))
    assert (found.cause, found.repaired_by) == ("other_probs", ("temperature",))
    assert found.prob_here > found.prob_raw > found.prob_there > 0


def test_a_draw_beside_a_greedy_row_and_the_other_way_round():
    seed = seed_for(1, HOT)
    found = parting((0, {}), (1, {**HOT, "seed": seed}))
    assert (found.cause, found.repaired_by) == ("drawn", ("temperature",))
    found = parting((1, {**HOT, "seed": seed}), (0, {}))
    assert (found.cause, found.repaired_by) == ("highest", ("temperature",))


def test_what_needs_two_settings_is_repaired_by_none_alone():
    first, own = {}, {"presence_penalty": 1.0, "repetition_penalty": 3.0}
    found = parting((0, first), (drawn(own, (0,)), own), past=(0,))
    assert (found.cause, found.repaired_by) == ("lowered", ())


def test_a_token_laid_down_by_hand_has_no_other_cause():
    found = parting((3, {}), (0, {}), by_hand=True)
    assert (found.cause, found.stage, found.repaired_by) == ("by_hand", None, ())


def test_the_figures_are_those_of_the_steps_under_the_raw_model(session):
    report = side_by_side(session, parse_grid(["temperature=1.5"], "3"), max_new_tokens=10, ignore_eos=True)
    (row,) = report.rows
    steps = alone(session, row, max_new_tokens=10, ignore_eos=True).path()
    assert row.entropy_nats_mean == pytest.approx(fmean(step.entropy_nats for step in steps), abs=1e-5)
    assert row.logprob_nats_mean == pytest.approx(fmean(step.logprob_nats for step in steps), abs=1e-5)
    assert row.top_prob == pytest.approx([step.candidates[0].prob_raw for step in steps], abs=1e-6)
    assert row.distinct_1 == len(set(row.token_ids)) / 10
    assert len(row.entropy_nats) == len(row.logprob_nats) == 10 and report.seconds > 0


def test_a_note_is_given_once_and_none_says_what_the_rows_tell(session):
    grid = parse_grid(["temperature=0,0.7", "top_p=0.9"], "1,2")
    assert side_by_side(session, grid, max_new_tokens=2).notes == ("note.filter_greedy",)


def test_a_row_that_goes_round_is_told_and_counted(session):
    grid = Grid((Cell("stuck", {"temperature": 0.01, "presence_penalty": -100}),), (1, 2))
    report = side_by_side(session, grid, max_new_tokens=60, ignore_eos=True)
    assert all(row.loop is not None and row.loop.period == 1 for row in report.rows)
    (setting,) = report.summary
    assert setting.loop_share == 1.0 and setting.repetition_rate.mean > 0.9


def test_a_setting_is_summed_up_over_its_seeds(session):
    report = side_by_side(session, parse_grid(["temperature=1.2,0.2"], "1,2,3"), max_new_tokens=8, ignore_eos=True)
    assert [(setting.name, setting.seeds) for setting in report.summary] == [
        ("temperature=1.2", 3),
        ("temperature=0.2", 3),
    ]
    hot, rows = report.summary[0], report.rows[:3]
    entropies = [row.entropy_nats_mean for row in rows]
    assert (hot.entropy_nats.mean, hot.entropy_nats.std) == (fmean(entropies), pstdev(entropies))
    assert hot.distinct_2.mean == fmean(row.distinct_2 for row in rows)
    assert hot.top_prob_by_step == tuple(
        fmean(column) for column in zip(*(row.top_prob for row in rows), strict=True)
    )


def test_the_prompt_is_read_once_however_many_batches_there_are(session):
    grid = parse_grid(["temperature=0.9"], ",".join(map(str, range(2 * ROWS_AT_ONCE + 1))))
    with counted(session.model) as passes:
        report = side_by_side(session, grid, "x" * 100, max_new_tokens=3, ignore_eos=True)
    rows = len(report.rows)
    again = 2  # batches that read the prompt's last token once more, for its logits
    assert passes.token_forwards == 100 + again + 2 * rows
    assert report.complete and {row.finish_reason for row in report.rows} == {"length"}


def test_what_was_decoded_before_an_interruption_is_kept(session):
    study = SideBySide(session, session.prompt("Hi", chat=False), parse_grid(["temperature=0.9"], "1,2,3"),
                       RunOptions(max_new_tokens=50, ignore_eos=True))  # fmt: skip
    assert not study.begun
    steps = study.steps()
    assert list(islice(steps, 8))[-1] == (8, 150)
    steps.close()
    report = study.report()
    assert [len(row.token_ids) for row in report.rows] == [3, 3, 2]
    assert {row.finish_reason for row in report.rows} == {"interrupted"} and not report.complete


def test_saved_rows_are_runs_of_their_own(session, tmp_path):
    report = side_by_side(
        session, parse_grid(["temperature=0.9"], "1,2"), max_new_tokens=4, save=tmp_path / "rows"
    )
    saved = [read_trace(tmp_path / "rows" / name) for name in ("0000", "0001")]
    assert [tuple(trace.token_ids) for trace in saved] == [row.token_ids for row in report.rows]
    assert len(saved[0].steps[0].candidates) >= 50
    alone_in_its_folder = tmp_path / "one"
    side_by_side(session, parse_grid(["preset=greedy"]), max_new_tokens=2, save=alone_in_its_folder)
    assert [path.name for path in alone_in_its_folder.iterdir()] == ["0000"]


def test_more_rows_than_can_be_saved_are_refused_before_any_work(session, tmp_path):
    grid = parse_grid(["temperature=0.9"], ",".join(map(str, range(65))))
    with pytest.raises(InputError, match="--save keeps at most 64 rows"):
        side_by_side(session, grid, save=tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_the_parameters_of_a_row_are_told_whole(session):
    (row,) = side_by_side(session, parse_grid(["top_k=3"], "4"), max_new_tokens=1).rows
    assert row.settings.keys() == SamplingParams().values().keys() - {"seed"}
    assert (row.settings["top_k"], row.seed, row.stages) == (3, 4, ("top_k",))
