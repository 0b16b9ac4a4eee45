"""Engines that are timed: ours does what a run does, in its own process too; what fails is told and harms no other."""

import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from decodescope import Session
from decodescope.errors import InputError
from decodescope.experiments.bench.loading import Loads
from decodescope.experiments.bench.machine import GEMM_DTYPES, Limits
from decodescope.experiments.bench.messages import CacheTask, Contender, DecodeTask, PrefillTask, Setup
from decodescope.experiments.bench.ours import Engine
from decodescope.experiments.bench.page_cache import make_cold
from decodescope.experiments.bench.plan import QUICK, Case, settle
from decodescope.experiments.bench.process import EngineFault, Pool, Process
from decodescope.experiments.bench.rounds import Rounds
from decodescope.loading import Loading
from decodescope.model.kernels import available
from tiny_model import make_tiny_model

PROMPT = tuple(range(60, 76))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


def setup(folder: Path, engine: str = "decodescope", format: str = "stored", **loading) -> Setup:
    held = asdict(Loading(threads=1, **loading))
    return Setup(engine, format, str(folder), None, "cpu", 1, 128, held)


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine(setup(folder))


@pytest.mark.parametrize("recording", [False, True])
def test_what_is_timed_are_the_tokens_of_a_run(engine, folder, recording):
    session = Session.open(str(folder))
    prompt = session.prompt("a prompt", chat=False)
    timed = engine.decode(DecodeTask((tuple(prompt.ids),), 6, recording=recording))
    assert timed.ids == tuple(session.run(prompt, max_new_tokens=7, ignore_eos=True).token_ids)
    assert timed.tokens == 6 and timed.seconds > 0
    assert timed.position_bytes == 2 * 2 * 2 * 8 * 4


def test_rows_of_a_batch_count_each(engine):
    timed = engine.decode(DecodeTask((PROMPT, PROMPT[1:] + PROMPT[:1]), 5))
    assert timed.tokens == 10 and len(timed.ids) == 6


def test_a_filled_cache_is_as_long_as_was_asked_for_and_decodes(engine):
    task = DecodeTask((PROMPT[:1],), 4, filled=99)
    timed = engine.decode(task)
    assert task.context == 100 and timed.tokens == 4 and timed.position_bytes == 2 * 2 * 2 * 8 * 4
    assert timed.ids == engine.decode(task).ids  # the same random keys and values every time


def test_prefill_counts_the_prompt(engine):
    timed = engine.prefill(PrefillTask(PROMPT))
    assert timed.tokens == len(PROMPT) and timed.seconds > 0


def test_the_cache_is_taken_away_as_in_the_command_kv(engine):
    found = engine.cache(CacheTask(PROMPT, (2, 8), 3))
    assert [each.token_forwards for each in found.cached] == [4, 10]
    assert [each.token_forwards for each in found.uncached] == [9, 27]


def test_a_process_answers_as_the_engine_does(engine, folder):
    process = Process(setup(folder))
    try:
        task = DecodeTask((PROMPT,), 4)
        assert process.decode(task).ids == engine.decode(task).ids
        assert process.prefill(PrefillTask(PROMPT)).tokens == len(PROMPT)
        assert process.cache(CacheTask(PROMPT, (2,), 3)).uncached[0].token_forwards == 9
        assert process.opened.weights_bytes == engine.opened.weights_bytes
        assert 0 < process.at_start.rss_bytes <= process.memory().peak_rss_bytes
    finally:
        process.close()


def test_a_portable_process_has_no_kernels_and_the_same_tokens(engine, folder):
    process = Process(setup(folder), portable=True)
    try:
        assert process.opened.kernels is None
        assert process.decode(DecodeTask((PROMPT,), 4)).ids == engine.decode(DecodeTask((PROMPT,), 4)).ids
    finally:
        process.close()


def test_a_fault_of_ours_comes_out_of_the_process_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError) as fault:
        Process(setup(tmp_path))
    assert fault.value.key == "config.architecture"


def test_an_engine_that_cannot_open_says_why(folder):
    with pytest.raises(EngineFault, match="nowhere"):
        Process(setup(folder, "nowhere"))


def test_a_pool_opens_side_by_side_what_fits_and_in_turn_what_does_not(folder):
    one, other = Contender(), Contender(format="float32")
    sizes = {one: 0, other: 1 << 60}
    pool = Pool(lambda contender: setup(folder), lambda contender: sizes[contender])
    try:
        first = pool.get(one)
        assert pool.get(one) is first and not pool.took_turns
        second = pool.get(other)
        assert pool.took_turns and first._process.poll() is not None and second._process.poll() is None
        assert pool.peaks[one].peak_rss_bytes > 0  # taken down before it was closed
        assert set(pool.opened) == {one, other}
        os.kill(second._process.pid, signal.SIGKILL)
        with pytest.raises(EngineFault, match="-9"):  # and no endless wait
            second.prefill(PrefillTask(PROMPT))
    finally:
        pool.close()


def test_one_that_fails_is_left_out_and_the_others_go_on(folder):
    plan = settle(QUICK, {"rounds": 2, "new_tokens": 2})
    bad, task = Contender("nowhere"), DecodeTask((PROMPT,), 2)
    pool = Pool(lambda contender: setup(folder, contender.engine), lambda contender: 0)
    rounds = Rounds([Case("against", Contender(), task), Case("against", bad, task)], plan, pool, limits())
    try:
        assert len(list(rounds.run())) == 4
    finally:
        pool.close()
    good, failed = rounds.series
    assert len(good.timed) == len(good.limits) == 2 and failed.timed == []
    assert "nowhere" in str(rounds.failed[bad])


def limits() -> Limits:
    return Limits(torch.device("cpu"), torch.get_num_threads(), 0)


def test_the_machine_is_measured_with_one_thread_and_with_all(all_threads):
    found = limits()
    assert found.machine() is None
    found.look()
    machine = found.machine()
    counts = tuple(rate.threads for rate in machine.read)
    assert counts == found.thread_counts and counts[0] == 1 and counts[-1] == torch.get_num_threads()
    assert {(rate.dtype, rate.threads) for rate in machine.gemm} == {(d, n) for d in GEMM_DTYPES for n in counts}
    assert machine.gemm_flops == max(rate.flops for rate in machine.gemm if rate.threads == counts[-1])
    assert (machine.read_gain is None) == (len(counts) == 1)
    assert machine.kernels == available().instructions


def test_threads_that_gain_nothing_are_seen():
    found = Limits(torch.device("cpu"), 2, 0)
    found._reads = {1: [10.0, 10.0], 2: [10.0, 10.0]}
    found._gemms = {(dtype, threads): [5.0, 5.0] for dtype in GEMM_DTYPES for threads in (1, 2)}
    assert found.machine().threads_in_vain  # two multiply no faster than one
    found._gemms["float32", 2] = [9.0, 9.0]
    assert not found.machine().threads_in_vain  # one thread may well read all that memory gives
    found._reads[2] = [1.0, 20.0, 1.0]
    found._reads[1] = [10.0, 10.0, 10.0]
    assert found.machine().threads_in_vain


def test_a_file_can_be_made_cold_and_is_the_same_afterwards(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (1 << 20))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    if not make_cold([path]):
        pytest.skip("this system keeps the file in its page cache; ends on a Linux with a disk")
    assert path.read_bytes() == b"x" * (1 << 20)


def test_a_file_that_is_not_there_is_not_cold(tmp_path):
    assert not make_cold([tmp_path / "missing"])


def test_opening_is_timed_warm_and_cold_where_that_can_be(folder, tmp_path):
    loads = Loads([tmp_path / "missing"], setup(folder))
    assert len(list(loads.run(1))) == 2
    assert [row.file for row in loads.rows()] == ["warm"] and loads.no_cold
    assert loads.rows()[0].rounds == 1
