"""Laws of forks in a run folder: they are added, killed and read without touching the run they leave."""

import errno
import fcntl
import math
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import (
    BRANCHES,
    ENDS,
    RUNS,
    SETTING,
    TABLES,
    as_format,
    chain,
    edit,
    plain_branch,
    plain_end,
    plain_intervention,
    plain_run,
    plain_step,
    query,
    trees,
    tuples,
)

from decodescope.errors import InputError, ResourceError
from decodescope.trace.ends import end_of, stopping_guard
from decodescope.trace.lines import record_line
from decodescope.trace.records import Branch, End, Setting, Step, Timing, Trace, path_to
from decodescope.trace.saved import read_outline, read_sites, read_trace, saved_tensors
from decodescope.trace.schema import FORMAT
from decodescope.trace.site_records import SiteSummary
from decodescope.trace.store import TraceWriter

HERE = Path(__file__).parent
HOT = (Setting("temperature", 1.5, "command line"), Setting("top_k", 0, "default"))


def lines(records) -> list[dict]:
    """Records as values that compare: NaN equals itself."""
    return [record_line(record) for record in records]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ended(folder: Path, steps: list[Step], end: End | None = None) -> Path:
    """A run that came to its end at its last step."""
    with TraceWriter.create(folder, plain_run()) as writer:
        for step in steps:
            writer.write(step)
        writer.finish(end or end_of(plain_run(), steps, "length"))
    return folder


def killed(folder: Path, steps: list[Step]) -> Path:
    """A run that came to none."""
    with TraceWriter.create(folder, plain_run()) as writer:
        for step in steps:
            writer.write(step)
    return folder


def fork(folder: Path, at: int | None, count: int = 1, given_settings: tuple[Setting, ...] = ()) -> Branch:
    """A fork of `count` tokens under node `at`."""
    writer = TraceWriter.reopen(folder, given_settings)
    steps = read_outline(folder).steps
    step = len(path_to(steps, at))
    for _ in range(count):
        steps.append(plain_step(writer.next_node, at, candidates=3))
        writer.write(steps[-1])
        at = steps[-1].node
    end = end_of(plain_run(), path_to(steps, at), "length")
    branch = Branch(step, given_settings, "2026-01-02T00:00:00Z", end)
    writer.write_branch(branch)
    writer.close()
    return branch


def finish(writer: TraceWriter, branch: Branch) -> None:
    """The last fork of an opening ends."""
    writer.write_branch(branch)
    writer.close()


def known_as(branch: Branch, folder: Path, steps: list[Step]) -> Branch:
    """The branch as it is read: where it lies is told, and which guard ended it follows from its last step."""
    last = next((step for step in steps if step.node == branch.end.node), None)
    guard = stopping_guard(branch.end.finish_reason, last)
    return replace(branch, end=replace(branch.end, trace=str(folder), stop_guard=guard))


# --- what is written comes back


@given(run=RUNS, steps=trees(), end=ENDS, grown=st.lists(st.tuples(trees(), BRANCHES), max_size=3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_forks_come_back_equal_and_leave_the_run_as_it_was(run, steps, end, grown, data):
    end = replace(end, node=data.draw(st.sampled_from([None, *(step.node for step in steps)])))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        with TraceWriter.create(folder, run) as writer:
            for step in steps:
                writer.write(step)
            writer.finish(end)
        before, branches = read_trace(folder), []
        for own, branch in grown:
            with TraceWriter.reopen(folder, data.draw(tuples(SETTING))) as writer:
                base = writer.next_node
                for at, step in enumerate(own):
                    parent = data.draw(st.sampled_from([None, *(each.node for each in steps)]))
                    steps = [*steps, replace(step, node=base + at, parent=parent)]
                    writer.write(steps[-1])
                node = data.draw(st.sampled_from([None, *(each.node for each in steps)]))
                branch = replace(branch, end=replace(branch.end, node=node))
                finish(writer, branch)
            branches.append(known_as(branch, folder, steps))
        trace = read_trace(folder)
        assert names(folder) == ["trace.db"]
        assert lines([trace.run, *trace.steps]) == lines([run, *steps])
        assert trace.branches == branches
        kinds = [
            [type(each.value) for branch in made for each in branch.settings]
            for made in (trace.branches, branches)
        ]
        assert kinds[0] == kinds[1]
        assert trace.end == before.end and trace.text == before.text
        if end.node is not None or not end.new_tokens:  # every end that is made names its node
            assert lines(trace.path()) == lines(before.path())


def test_an_outline_lacks_nothing_but_candidates_and_stages(tmp_path):
    folder = ended(tmp_path / "run", chain(3))
    fork(folder, at=1, given_settings=HOT)
    trace, outline = read_trace(folder), read_outline(folder)
    assert outline.steps == [replace(step, candidates=(), stages=()) for step in trace.steps]
    assert replace(outline, steps=[]) == replace(trace, steps=[])


def test_a_step_keeps_its_draw_its_probabilities_and_what_guards_did(tmp_path):
    plain = plain_step(0, None, candidates=3)
    stages = tuple(replace(stage, probs=(0.5, math.nan, 0.0)) for stage in plain.stages[:1]) + plain.stages[1:]
    acted = (plain_intervention(), replace(plain_intervention("temperature"), temperature=1.25, measured=math.inf))
    step = replace(plain, stages=stages, mass_above=0.25, interventions=acted)
    folder = ended(tmp_path / "run", [step, plain_step(1, 0)])
    assert repr(read_trace(folder).steps) == repr([step, plain_step(1, 0)])
    counts = [query(folder, f"SELECT count(*) FROM {name}") for name in ("draw", "stage_prob", "intervention")]
    assert counts == [[(1,)], [(3,)], [(2,)]]  # nothing where nothing was drawn, asked for, or done


def test_probabilities_of_some_candidates_only_are_a_mistake_of_the_caller(tmp_path):
    step = plain_step(0, None, candidates=3)
    bad = replace(step, stages=(replace(step.stages[0], probs=(0.5, 0.5)),))
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        with pytest.raises(ValueError, match="probabilities"):
            writer.write(bad)
        writer.write(step)
    assert read_trace(tmp_path / "run").steps == [step]


def test_a_hundred_forks_leave_the_parent_as_it_was(tmp_path):
    parent = [plain_step(n, n - 1 if n else None, candidates=3) for n in range(5)]
    folder = ended(tmp_path / "run", parent)
    before = read_trace(folder)
    made = [fork(folder, at=number % 5, count=2) for number in range(100)]
    trace = read_trace(folder)
    assert (trace.run, trace.end, trace.path(), trace.text) == (before.run, before.end, parent, before.text)
    assert trace.steps[:5] == parent and len(trace.steps) == 205
    assert trace.branches == [known_as(branch, folder, trace.steps) for branch in made]
    paths = [path_to(trace.steps, branch.end.node) for branch in trace.branches]
    for number, (path, branch) in enumerate(zip(paths, trace.branches, strict=True)):
        assert branch.step == number % 5 + 1
        assert path[: branch.step] == parent[: branch.step] and len(path) == branch.step + 2
    assert names(folder) == ["trace.db"]
    assert len(query(folder, "SELECT * FROM sampler_filter")) == 2  # the forks use those of the run


def test_forks_of_one_opening_end_one_by_one(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    writer = TraceWriter.reopen(folder, HOT)
    for step in (plain_step(2, 0), plain_step(3, 0), plain_step(4, 2)):
        writer.write(step)
    first = replace(plain_branch(3, 1), settings=HOT)
    writer.write_branch(first)
    writer.write(plain_step(5, 4))
    seen = read_trace(folder).branches
    assert [(each.end.finish_reason, each.end.node, each.settings) for each in seen] == [
        ("length", 3, HOT), ("interrupted", 5, HOT),
    ]  # fmt: skip
    second = replace(plain_branch(5, 1), settings=HOT[:1])
    finish(writer, second)
    trace = read_trace(folder)
    assert trace.branches == [known_as(each, folder, trace.steps) for each in (first, second)]
    assert query(folder, "SELECT branch_id, name FROM branch_setting") == [
        (1, "temperature"), (1, "top_k"), (2, "temperature"),
    ]  # fmt: skip


def test_a_fork_without_a_token_of_its_own_is_one(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    finish(TraceWriter.reopen(folder), plain_branch(0, 1))
    finish(TraceWriter.reopen(folder), plain_branch(None))
    trace = read_trace(folder)
    assert [branch.end.node for branch in trace.branches] == [0, None] and len(trace.steps) == 2


def test_tensors_and_filters_go_on_being_counted(tmp_path):
    import numpy as np

    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write(plain_step(0, None))
        writer.write_tensors({"logits": np.zeros(3, np.float32)})
        writer.finish(plain_end())
    writer = TraceWriter.reopen(tmp_path / "run")
    step = plain_step(1, None)
    writer.write(replace(step, stages=(replace(step.stages[1], settings={"top_k": 7}), step.stages[0])))
    writer.write_tensors({"logits": np.ones(3, np.float32)})
    finish(writer, plain_branch(1))
    assert [(each.file, each.node) for each in saved_tensors(tmp_path / "run")] == [
        ("tensors/0001.safetensors", 0), ("tensors/0002.safetensors", 1),
    ]  # fmt: skip
    assert [stage.settings for stage in read_trace(tmp_path / "run").steps[1].stages] == [
        {"top_k": 7}, {"temperature": 0.7},
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [plain_branch(77), plain_branch(0, step=-1)])
def test_a_fork_that_cannot_be_is_a_mistake_of_the_caller(tmp_path, bad):
    folder = ended(tmp_path / "run", chain(1))
    with TraceWriter.reopen(folder) as writer, pytest.raises(ValueError, match="no fork of this run"):
        writer.write_branch(bad)
    assert read_trace(folder).branches == []


def test_the_run_and_its_forks_end_each_in_their_own_way(tmp_path):
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        with pytest.raises(ValueError, match="no fork of this run"):
            writer.write_branch(plain_branch(None))
        writer.finish(plain_end())
    with TraceWriter.reopen(tmp_path / "run") as writer, pytest.raises(ValueError, match="the run has ended"):
        writer.finish(plain_end())
    assert read_trace(tmp_path / "run").end == replace(plain_end(), trace=str(tmp_path / "run"))


# --- runs and forks without an end


def test_a_killed_run_keeps_its_branch_when_it_is_forked(tmp_path):
    folder = killed(tmp_path / "run", [plain_step(0, None), plain_step(1, 0), plain_step(2, 0)])
    before = read_trace(folder)
    fork(folder, at=1, count=3)
    trace = read_trace(folder)
    assert (trace.end, trace.path(), trace.text) == (before.end, before.path(), before.text)
    assert trace.end.finish_reason == "interrupted"
    assert query(folder, "SELECT finish_reason, node_id FROM ending") == [("interrupted", 2)]


def test_a_run_killed_before_its_first_token_can_be_forked(tmp_path):
    folder = killed(tmp_path / "run", [])
    fork(folder, at=None, count=2)
    trace = read_trace(folder)
    assert (trace.path(), trace.text, len(trace.steps)) == ([], "", 2)
    assert trace.branches[0].end.new_tokens == 2


def left(folder: Path, at: int | None, count: int) -> None:
    """A fork that came to no end, under other settings."""
    with TraceWriter.reopen(folder, HOT) as writer:
        for _ in range(count):
            writer.write(plain_step(writer.next_node, at))
            at = writer.next_node - 1


def test_a_fork_left_without_an_end_is_interrupted_with_its_settings_and_stays_so(tmp_path):
    folder = ended(tmp_path / "run", chain(3))
    left(folder, at=1, count=2)
    (branch,) = read_trace(folder).branches
    assert (branch.step, branch.settings, branch.end.finish_reason) == (2, HOT, "interrupted")
    assert (branch.end.text, branch.end.new_tokens, branch.end.node) == (" w0 w1 w3 w4", 4, 4)
    assert branch.started_at == query(folder, "SELECT started_at FROM reopened")[0][0]
    left(folder, at=None, count=1)
    trace = read_trace(folder)
    assert trace.branches[0] == branch and trace.branches[1].end.node == 5
    assert trace.branches[1].step == 0 and trace.path() == chain(3)
    fork(folder, at=0)
    assert read_trace(folder).branches[:2] == trace.branches
    assert query(folder, "SELECT count(*) FROM branch") == [(3,)]


def test_the_times_of_a_fork_are_those_of_its_own_steps(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    slow = replace(plain_step(2, 1), timing=Timing(3.0, 0.5, 4.0))
    with TraceWriter.reopen(folder) as writer:
        writer.write(slow)
        writer.write(plain_step(3, 2))
    (branch,) = read_trace(folder).branches
    assert (branch.end.ttft_s, branch.end.new_tokens) == (3.5, 4)
    assert branch.end.decode_tokens_per_s == pytest.approx(1 / 0.06)


def test_a_folder_opened_for_nothing_has_no_fork(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    left(folder, at=0, count=0)
    assert read_trace(folder).branches == [] and query(folder, "SELECT * FROM branch_setting") == []
    fork(folder, at=0)
    assert [branch.settings for branch in read_trace(folder).branches] == [()]


class Interrupted(set):
    """Known nodes that Ctrl-C keeps from being told of one more: the step is committed by then."""

    def add(self, node: int) -> None:
        raise KeyboardInterrupt


def test_a_step_that_was_committed_as_ctrl_c_came_is_no_fork_of_its_own(tmp_path):
    folder = ended(tmp_path / "run", chain(3))
    with TraceWriter.reopen(folder) as writer:
        writer._nodes = Interrupted(writer._nodes)
        with pytest.raises(KeyboardInterrupt):
            writer.write(plain_step(writer.next_node, 1))
        end = end_of(plain_run(), chain(2), "interrupted")
        finish(writer, Branch(2, (), "2026-01-02T00:00:00Z", end))
    saved = read_trace(folder)
    assert len(saved.steps) == 4 and [branch.end.node for branch in saved.branches] == [1]


def test_tokens_taken_back_inside_a_fork_are_no_fork_of_their_own(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    with TraceWriter.reopen(folder) as writer:
        writer.write(plain_step(2, 0))
        writer.write(plain_step(3, 0))
        finish(writer, plain_branch(2, 1))
    assert [branch.end.node for branch in read_trace(folder).branches] == [2]


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sample_records import plain_step
from decodescope.trace.store import TraceWriter
writer = TraceWriter.reopen(Path(sys.argv[1]))
for number in range(20, 100000):
    writer.write(plain_step(number, number - 1 if number > 20 else 9))
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_in_a_fork_loses_no_committed_step_and_nothing_of_the_run(tmp_path, seed):
    folder = ended(tmp_path / "run", chain(20))
    before = read_trace(folder)
    command = [sys.executable, "-c", CHILD.format(here=str(HERE)), str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen = [child.stdout.readline()]
    with pytest.raises(InputError, match="still being written"):
        TraceWriter.reopen(folder)
    time.sleep(random.Random(seed).uniform(0, 0.2))
    child.send_signal(signal.SIGKILL)
    seen += child.stdout.readlines()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    committed = sum(line.endswith("\n") for line in seen)
    trace = read_trace(folder)
    own = len(trace.steps) - 20
    assert committed <= own <= committed + 1
    assert (trace.end, trace.path()) == (before.end, before.path())
    (branch,) = trace.branches
    path = path_to(trace.steps, branch.end.node)
    assert (branch.step, branch.end.finish_reason, len(path)) == (10, "interrupted", 10 + own)
    assert path[:10] == chain(10)
    fork(folder, at=branch.end.node)
    assert read_trace(folder).branches[0] == branch
    assert names(folder) == ["trace.db"]


# --- one writer at a time


def test_a_folder_has_one_writer_and_any_number_of_readers(tmp_path):
    folder = tmp_path / "run"
    writer = TraceWriter.create(folder, plain_run())
    writer.write(plain_step(0, None))
    with pytest.raises(InputError, match=f"The run in {folder} is still being written"):
        TraceWriter.reopen(folder)
    assert len(read_trace(folder).steps) == 1
    writer.finish(plain_end())
    again = TraceWriter.reopen(folder)
    with pytest.raises(InputError, match="still being written"):
        TraceWriter.reopen(folder)
    finish(again, plain_branch(0))
    writer.close()  # a second time: nothing of the other's is let go
    TraceWriter.reopen(folder).close()


def test_a_writer_that_is_dropped_lets_go(tmp_path):
    folder = ended(tmp_path / "run", chain(1))
    writer = TraceWriter.reopen(folder)
    del writer
    TraceWriter.reopen(folder).close()


def test_what_cannot_be_opened_again_is_not_locked(tmp_path):
    folder = ended(tmp_path / "run", chain(1))
    edit(folder, "UPDATE node SET step = 'one'")
    for _ in range(2):
        with pytest.raises(InputError, match="damaged"):
            TraceWriter.reopen(folder)
    edit(folder, "UPDATE node SET step = 0")
    TraceWriter.reopen(folder).close()


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_without_locks_does_not_stand_in_the_way(tmp_path, monkeypatch, reason):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = ended(tmp_path / "run", chain(1))
    fork(folder, at=0)
    assert len(read_trace(folder).branches) == 1


# --- older formats


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("finished", [True, False])
def test_an_older_run_is_brought_up_to_date_when_it_is_forked(tmp_path, version, finished):
    new = (ended if finished else killed)(tmp_path / "new", chain(4))
    old = as_format(version, new, tmp_path / "old")
    before = read_trace(old)
    fork(old, at=1, count=2)
    trace = read_trace(old)
    assert (trace.run, trace.steps[:4], trace.end) == (before.run, before.steps, before.end)
    assert len(trace.branches) == 1 and query(old, "PRAGMA user_version") == [(FORMAT,)]
    tables = query(old, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    assert [name for (name,) in tables] == sorted(table.name for table in TABLES)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_bringing_up_to_date_is_all_or_nothing(tmp_path, version):
    old = as_format(version, killed(tmp_path / "new", chain(2)), tmp_path / "old")
    with pytest.raises(ValueError, match="temperature"):
        TraceWriter.reopen(old, [Setting("temperature", math.nan, "command line")])
    assert query(old, "PRAGMA user_version") == [(version,)]
    assert query(old, "SELECT * FROM ending") == []
    assert query(old, "SELECT count(*) FROM sqlite_schema WHERE name = 'branch'") == [(version >= 3,)]
    assert read_trace(old).steps == chain(2) and names(old) == ["trace.db"]


# --- folders that will not do


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "There is no folder"),
        (lambda path: path.write_text("x"), "is not a folder"),
        (lambda path: path.mkdir(), "holds no saved run"),
        (lambda path: (path.mkdir(), (path / "trace.db").touch()), "stopped before anything was recorded"),
        (lambda path: (path.mkdir(), (path / "trace.db").write_bytes(b"no database " * 99)), "another program"),
    ],
)
def test_what_is_no_run_cannot_be_forked_and_is_left_alone(tmp_path, make, sentence):
    make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=sentence):
        TraceWriter.reopen(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


HIGH = 2**62


def content(folder: Path) -> list[str]:
    """Everything in the database, as SQL that would make it again."""
    with closing(sqlite3.connect(folder / "trace.db")) as connection:
        return list(connection.iterdump())


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("PRAGMA user_version = 99", "saved by a newer decodescope"),
        ("DROP TABLE branch", "damaged .sqlite_schema."),
        ("CREATE TRIGGER t AFTER INSERT ON node BEGIN DELETE FROM node; END", "triggers or indexes"),
        ("CREATE UNIQUE INDEX i ON node (step)", "triggers or indexes"),
        ("CREATE INDEX i ON node (hex(zeroblob(1000000)))", "triggers or indexes"),
        (f"INSERT INTO tensor VALUES ({HIGH}, 'q', 0, 'float32', '[1]', 4)", "damaged .tensor.block."),
        ("INSERT INTO tensor VALUES ('x', 'q', 0, 'float32', '[1]', 4)", "damaged .tensor.block."),
        ("INSERT INTO tensor VALUES (1, 'q', 'x', 'float32', '[1]', 4)", "damaged .tensor.node_id."),
        (f"INSERT INTO sampler_filter VALUES ({HIGH}, 'x', '{{}}')", "damaged .sampler_filter.id."),
        (f"INSERT INTO draw VALUES ({HIGH}, 0.5)", "damaged .draw.node_id."),
        (f"INSERT INTO candidate SELECT {HIGH}, 0, 1, 1, '', '', 0, 0, 0, NULL", "damaged .candidate.node_id."),
        (f"UPDATE node SET id = {HIGH} WHERE id = 1; UPDATE ending SET node_id = NULL", "damaged .node.id."),
    ],
)
def test_a_database_that_would_act_or_overflow_is_not_written_to(tmp_path, script, sentence):
    folder = edit(ended(tmp_path / "run", chain(2)), script)
    before = content(folder)
    with pytest.raises(InputError, match=sentence):
        TraceWriter.reopen(folder)
    assert content(folder) == before and names(folder) == ["trace.db"]


def test_rows_of_nodes_that_are_not_there_are_not_taken_for_those_of_a_fork(tmp_path):
    folder = ended(tmp_path / "run", chain(2))
    edit(
        folder,
        "INSERT INTO candidate SELECT 2, ordinal, rank, token_id, 'lie', bytes_hex, logit, prob_raw, prob_final, NULL"
        " FROM candidate WHERE node_id = 1; INSERT INTO draw VALUES (4, 0.5)",
    )
    branch = fork(folder, at=1)
    trace = read_trace(folder)
    assert trace.steps[2] == plain_step(5, 1, candidates=3) and branch.end.node == 5


@pytest.mark.parametrize("name", ["trace.db", "tensors"])
def test_a_link_is_not_written_through(tmp_path, name):
    folder, elsewhere = ended(tmp_path / "run", chain(1)), tmp_path / "elsewhere"
    if name == "trace.db":
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)
    else:
        elsewhere.mkdir()
        (folder / name).symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(InputError, match=f"{folder / name} is a link"):
        TraceWriter.reopen(folder)


def test_a_link_that_waits_where_a_block_is_to_be_written_is_not_followed(tmp_path):
    import numpy as np

    folder, mine = ended(tmp_path / "run", chain(1)), tmp_path / "mine"
    mine.write_text("mine")
    (folder / "tensors").mkdir()
    for name in ("0001.partial", "0001.safetensors"):
        (folder / "tensors" / name).symlink_to(mine)
    with TraceWriter.reopen(folder) as writer:
        writer.write_tensors({"logits": np.zeros(3, np.float32)})
    assert mine.read_text() == "mine"
    assert names(folder / "tensors") == ["0001.safetensors"]
    assert not (folder / "tensors" / "0001.safetensors").is_symlink()


READ_ONLY = """
import os, sys
from pathlib import Path
from decodescope.errors import InputError
from decodescope.trace.store import TraceWriter
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
try:
    TraceWriter.reopen(Path(sys.argv[1]))
except InputError as fault:
    print(fault.key)
"""


@pytest.mark.parametrize("closed", ["folder", "file"])
def test_where_nothing_can_be_written_it_is_said_in_one_sentence(closed):
    public = Path(tempfile.mkdtemp())  # tmp_path itself is closed to other users
    public.chmod(0o755)
    try:
        folder = ended(public / "run", chain(1))
        folder.chmod(0o777 if closed == "file" else 0o555)
        (folder / "trace.db").chmod(0o444 if closed == "file" else 0o666)
        command = [sys.executable, "-c", READ_ONLY, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("trace.cannot_reopen\n", "")
        assert names(folder) == ["trace.db"]
    finally:
        shutil.rmtree(public)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("INSERT INTO draw VALUES (0, 'half')", "damaged .draw.mass_above: str"),
        ("INSERT INTO stage_prob VALUES (0, 0, 1, 0.5)", "damaged .stage_prob.candidate: 1"),
        ("INSERT INTO stage_prob VALUES (0, 0, 0, 0.5)", "damaged .stage_prob.candidate: 0"),
        ("INSERT INTO stage_prob VALUES (0, 0, 0, x'00')", "damaged .stage_prob.prob: bytes"),
        (
            "INSERT INTO intervention VALUES (0, 0, 'loop', 'explode', 1.0, 1.0, NULL)",
            "damaged .intervention.action",
        ),
        (
            "INSERT INTO intervention VALUES (0, 0, 'loop', 'warn', 'x', 1.0, NULL)",
            "damaged .intervention.measured",
        ),
        ("UPDATE branch SET node_id = 77", "damaged .branch.node_id: 77"),
        ("UPDATE branch SET step = -1", "damaged .branch.step: -1"),
        ("UPDATE branch SET step = 'one'", "damaged .branch.step: str"),
        ("UPDATE branch SET next_node_id = 'x'", "damaged .branch.next_node_id: str"),
        ("UPDATE branch SET finish_reason = 'tired'", "damaged .branch.finish_reason"),
        ("UPDATE branch_setting SET value_type = 'bool'", "damaged .setting.value_type"),
        ("UPDATE reopened SET next_node_id = 'x'", "damaged .reopened.next_node_id: str"),
        ("UPDATE reopened SET started_at = CAST(x'ff' AS TEXT)", "damaged .*UTF-8"),
    ],
)
def test_a_database_that_lies_about_forks_is_refused_in_one_sentence(tmp_path, script, sentence):
    folder = ended(tmp_path / "run", chain(2))
    fork(folder, at=0, given_settings=HOT)
    edit(folder, script)
    with pytest.raises(InputError, match=sentence):
        read_trace(folder)
    if "stage_prob" not in script:  # which reopening has no need of
        with pytest.raises(InputError, match=sentence):
            TraceWriter.reopen(folder)


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forked") / "run"
    step = plain_step(0, None, candidates=2)
    told = replace(step, mass_above=0.5, interventions=(plain_intervention(),))
    ended(folder, [replace(told, stages=tuple(replace(stage, probs=(0.5, 0.5)) for stage in step.stages))])
    with TraceWriter.reopen(folder, HOT) as writer:
        writer.write(plain_step(1, 0, candidates=2))
        writer.write_branch(replace(plain_branch(1, 1), settings=HOT))
        writer.write(plain_step(2, 0, candidates=2))
    return folder / "trace.db"


@given(flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_forked_or_refused_in_one_sentence_never_a_traceback(forked, flips):
    damaged = bytearray(forked.read_bytes())
    used = [at for at, byte in enumerate(damaged) if byte]
    for place, byte in flips:
        damaged[used[place % len(used)]] = byte
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "trace.db").write_bytes(damaged)
        try:
            writer = TraceWriter.reopen(folder)
            writer.write(plain_step(writer.next_node, None))
            finish(writer, plain_branch(writer.next_node - 1))
        except (InputError, ResourceError) as fault:
            assert scratch in str(fault)
        else:
            assert isinstance(read_outline(folder), Trace)


# --- a disk that fills up

FILLING = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sample_records import plain_branch, plain_step
from decodescope.errors import ResourceError
from decodescope.trace.store import TraceWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
writer = TraceWriter.reopen(Path(sys.argv[1]))
for number in range(5, 5000):
    try:
        writer.write(plain_step(number, number - 1))
    except ResourceError as fault:
        print(number, fault.key)
        break
writer.write(plain_step(9999, None))
writer.write_branch(plain_branch(5))
writer.close()
"""


def test_a_full_disk_in_a_fork_stops_it_once_and_keeps_all_that_was_there(tmp_path):
    folder = ended(tmp_path / "run", chain(5))
    before = read_trace(folder)
    command = [sys.executable, "-c", FILLING.format(here=str(HERE)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.stderr == ""
    count, key = done.stdout.split()
    assert key == "trace.disk_full" and int(count) > 8
    trace = read_trace(folder)
    assert trace.steps == chain(int(count))
    assert (trace.end, trace.path()) == (before.end, before.path())
    assert [branch.end.finish_reason for branch in trace.branches] == ["interrupted"]
    fork(folder, at=2)
    assert len(read_trace(folder).branches) == 2


def test_a_full_disk_at_the_opening_changes_nothing(tmp_path):
    old = as_format(1, ended(tmp_path / "new", chain(30)), tmp_path / "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (34_000, limits[1]))
    try:
        with pytest.raises(ResourceError, match="No room left while saving"):
            TraceWriter.reopen(old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert query(old, "PRAGMA user_version") == [(1,)]
    assert read_trace(old).steps == chain(30)
    fork(old, at=3)


# --- inner values


def seen(mark: float, step: int = 0) -> list[SiteSummary]:
    return [SiteSummary(step, 3, "up", (1, 5, 48), "float32", 240, mark, 1.0, -2.0, 2.0, 9.0, 1.0, 0.5, 0.0, 0)]


def test_what_a_fork_sees_is_not_taken_for_what_the_run_saw(tmp_path):
    folder = tmp_path / "run"
    with TraceWriter.create(folder, plain_run()) as writer:
        for step in chain(2):
            writer.write_sites(seen(step.node), step.node)
            writer.write(step)
        writer.write_sites(seen(2), 2)  # the pass after which nothing could be chosen
        writer.finish(end_of(plain_run(), chain(2), "error"))
    before = read_sites(folder)
    assert [each.mean for each in before] == [0, 1, 2]
    with TraceWriter.reopen(folder) as writer:
        assert writer.next_node == 3  # the number of that pass is not given to another
        writer.write_sites(seen(3), 3)
        writer.write(plain_step(3, 0))
        writer.write_sites(seen(4), 4)
        finish(writer, plain_branch(3, 1))
    assert read_sites(folder) == before
    assert query(folder, "SELECT id, node_id FROM site") == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
