"""Laws of the run folder: what is written comes back, and nothing committed is lost."""

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
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from sample_records import ENDS, RUNS, TABLES, chain, edit, plain_end, plain_run, plain_step, trees

from decodescope.errors import InputError, ResourceError
from decodescope.trace.ends import stopping_guard
from decodescope.trace.lines import record_line
from decodescope.trace.records import Stage, Trace, path_to
from decodescope.trace.saved import read_trace, saved_tensors
from decodescope.trace.schema import APPLICATION_ID, FORMAT, MIGRATIONS
from decodescope.trace.store import TraceWriter

HERE = Path(__file__).parent


def save(folder: Path, run, steps, end=None) -> Path:
    with TraceWriter.create(folder, run) as writer:
        for step in steps:
            writer.write(step)
        if end is not None:
            writer.finish(end)
    return folder


def lines(records) -> list[dict]:
    """Records as values that compare: NaN equals itself."""
    return [record_line(record) for record in records]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is written comes back


@given(run=RUNS, steps=trees(), end=ENDS, data=st.data())
@settings(max_examples=60)
def test_a_run_comes_back_equal(run, steps, end, data):
    end = replace(end, node=data.draw(st.sampled_from([None, *(step.node for step in steps)])))
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(Path(scratch) / "run", run, steps, end)
        trace = read_trace(folder)
        assert lines([trace.run, *trace.steps]) == lines([run, *steps])
        last = next((step for step in steps if step.node == end.node), None)
        assert trace.end == replace(end, trace=str(folder), stop_guard=stopping_guard(end.finish_reason, last))
        assert trace.branches == []
        assert list(trace.run.versions) == list(run.versions)
        types = [[type(setting.value) for setting in each.settings] for each in (trace.run, run)]
        assert types[0] == types[1]


def test_a_tree_of_forks_is_kept(tmp_path):
    parents = {0: None, 1: 0, 2: 1, 3: 0, 4: 3, 7: 1, 8: None}
    steps = [plain_step(node, parent) for node, parent in parents.items()]
    trace = read_trace(save(tmp_path / "run", plain_run(), steps, plain_end()))
    assert {step.node: step.parent for step in trace.steps} == parents
    assert [step.node for step in path_to(trace.steps, 7)] == [0, 1, 7]


def test_a_finished_run_is_a_single_file_with_our_marks(tmp_path):
    folder = save(tmp_path / "deep" / "er" / "run", plain_run(), chain(3), plain_end())
    assert names(folder) == ["trace.db"]
    with sqlite3.connect(folder / "trace.db") as connection:
        marks = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
    assert marks == [APPLICATION_ID, FORMAT] == [1685283696, len(MIGRATIONS)]


def test_equal_stages_of_many_steps_share_their_settings(tmp_path):
    steps = chain(20)
    steps[9] = replace(steps[9], stages=(Stage("top_k", {"top_k": 5}, 5, 0.5, 0.25),))
    folder = save(tmp_path / "run", plain_run(), steps, plain_end())
    connection = sqlite3.connect(folder / "trace.db")
    assert connection.execute("SELECT count(*) FROM sampler_filter").fetchone() == (3,)
    connection.close()
    assert read_trace(folder).steps == steps


def test_the_tables_in_the_code_are_the_tables_in_the_file(tmp_path):
    connection = sqlite3.connect(save(tmp_path / "run", plain_run(), []) / "trace.db")
    for table in TABLES:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")]
        assert sorted(columns) == sorted(column.name for column in table.columns)
    found = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    assert found == {table.name for table in TABLES}


@pytest.mark.parametrize("order", [[(0, None), (0, None)], [(2, None), (1, None)], [(0, None), (1, 5)]])
def test_a_step_out_of_order_is_refused_and_leaves_no_trace(tmp_path, order):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    writer.write(plain_step(*order[0]))
    with pytest.raises(ValueError, match="out of order"):
        writer.write(plain_step(*order[1]))
    writer.close()
    assert len(read_trace(tmp_path / "run").steps) == 1


def test_a_step_that_fails_half_way_is_rolled_back_and_the_run_goes_on(tmp_path):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    good = plain_step(0, None)
    bad = replace(good, stages=(*good.stages, Stage("x", {}, 1, "no number", 1.0)), text="\ud800")
    with pytest.raises(InputError, match="no Unicode"):
        writer.write(bad)
    writer.write(good)
    writer.finish(plain_end())
    assert read_trace(tmp_path / "run").steps == [good]


def test_a_setting_that_is_no_finite_number_is_a_mistake_of_the_caller(tmp_path):
    run = plain_run()
    bad = replace(run, settings=(replace(run.settings[0], value=math.nan),))
    with pytest.raises(ValueError, match="temperature"):
        TraceWriter.create(tmp_path / "run", bad)
    assert not (tmp_path / "run").exists()


def test_a_writer_may_be_used_from_another_thread(tmp_path):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    thread = threading.Thread(target=lambda: (writer.write(plain_step(0, None)), writer.finish(plain_end())))
    thread.start()
    thread.join()
    assert len(read_trace(tmp_path / "run").steps) == 1


# --- runs without an end


def test_a_run_left_without_an_end_is_interrupted_and_says_only_what_its_steps_tell(tmp_path):
    steps = [plain_step(0, None), plain_step(1, 0), plain_step(2, 0), plain_step(3, 2)]
    trace = read_trace(save(tmp_path / "run", plain_run(), steps))
    assert trace.end.finish_reason == "interrupted"
    assert (trace.end.text, trace.end.new_tokens, trace.end.prompt_tokens) == (" w0 w2 w3", 3, 5)
    assert trace.end.ttft_s == pytest.approx(0.051)
    assert trace.end.decode_tokens_per_s == pytest.approx(1 / 0.06)
    assert trace.end.peak_rss_bytes is None  # the highest of some samples is no peak
    assert trace.end.node == 3
    assert trace.end.stop_token_id is None and trace.end.error is None


def test_a_run_without_steps_invents_nothing(tmp_path):
    end = read_trace(save(tmp_path / "run", plain_run(), [])).end
    assert (end.finish_reason, end.new_tokens, end.text, end.node) == ("interrupted", 0, "", None)
    assert end.ttft_s is end.decode_tokens_per_s is end.peak_rss_bytes is None


def test_an_exception_inside_the_context_leaves_an_interrupted_run(tmp_path):
    with pytest.raises(KeyboardInterrupt), TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write(plain_step(0, None))
        raise KeyboardInterrupt
    assert names(tmp_path / "run") == ["trace.db"]
    assert read_trace(tmp_path / "run").end.finish_reason == "interrupted"


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sample_records import plain_run, plain_step
from decodescope.trace.store import TraceWriter
writer = TraceWriter.create(Path(sys.argv[1]), plain_run())
for number in range(100000):
    writer.write(plain_step(number, number - 1 if number else None))
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_any_moment_loses_no_committed_step(tmp_path, seed):
    command = [sys.executable, "-c", CHILD.format(here=str(HERE)), str(tmp_path / "run")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen = [child.stdout.readline()]
    time.sleep(random.Random(seed).uniform(0, 0.2))
    child.send_signal(signal.SIGKILL)
    seen += child.stdout.readlines()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    committed = sum(line.endswith("\n") for line in seen)
    trace = read_trace(tmp_path / "run")
    assert committed <= len(trace.steps) <= committed + 1
    assert trace.steps == chain(len(trace.steps))
    assert trace.end.finish_reason == "interrupted"
    assert read_trace(tmp_path / "run").steps == trace.steps  # reading took nothing away


# --- looking while it is written, and where nothing can be written


def test_a_reader_sees_the_steps_while_the_writer_is_open(tmp_path):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    for count, step in enumerate(chain(3), 1):
        writer.write(step)
        trace = read_trace(tmp_path / "run")
        assert len(trace.steps) == count
    writer.finish(plain_end())
    assert names(tmp_path / "run") == ["trace.db"]


def test_reading_changes_no_byte(tmp_path):
    folder = save(tmp_path / "run", plain_run(), chain(3), plain_end())
    before = (folder / "trace.db").read_bytes()
    read_trace(folder)
    assert (folder / "trace.db").read_bytes() == before
    assert names(folder) == ["trace.db"]


def crashed_copy(source: Path, target: Path, *files: str) -> Path:
    """The folder as a kill would leave it: the log not folded in."""
    target.mkdir()
    for file in files:
        shutil.copyfile(source / file, target / file)
    return target


def test_a_log_left_behind_is_read_even_from_read_only_media(tmp_path):
    writer = TraceWriter.create(tmp_path / "live", plain_run())
    for step in chain(3):
        writer.write(step)
    public = Path(tempfile.mkdtemp())  # tmp_path itself is closed to other users
    try:
        folder = crashed_copy(tmp_path / "live", public / "run", "trace.db", "trace.db-wal")
        writer.close()
        folder.chmod(0o555)
        public.chmod(0o755)
        reading = f"""
import os
from pathlib import Path
from decodescope.trace.saved import read_trace
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
folder = Path({str(folder)!r})
assert not os.access(folder, os.W_OK, effective_ids=True)
trace = read_trace(folder)
print(len(trace.steps), trace.end.finish_reason)
"""
        done = subprocess.run([sys.executable, "-c", reading], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("3 interrupted\n", "")
        assert names(folder) == ["trace.db", "trace.db-wal"]
    finally:
        shutil.rmtree(public)


# --- folders that will not do


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        TraceWriter.create(tmp_path, plain_run())
    assert names(tmp_path) == ["note.txt"]
    folder = save(tmp_path / "run", plain_run(), chain(1), plain_end())
    with pytest.raises(InputError, match="is not empty"):
        TraceWriter.create(folder, plain_run())
    assert len(read_trace(folder).steps) == 1


def test_an_empty_folder_will_do(tmp_path):
    assert read_trace(save(tmp_path, plain_run(), chain(1), plain_end())).steps == chain(1)


@pytest.mark.parametrize("below", ["", "run", "a/b/run"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError) as fault:
        TraceWriter.create(file / below, plain_run())
    assert str(fault.value).startswith(f"{file} is a file")


def test_an_unwritable_place_is_one_sentence(tmp_path):
    place = Path("/proc/decodescope-run") if os.geteuid() == 0 else tmp_path / "closed" / "run"
    if place.is_relative_to(tmp_path):
        place.parent.mkdir(mode=0o555)
    with pytest.raises(InputError, match=f"Cannot save a run in {place}"):
        TraceWriter.create(place, plain_run())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "There is no folder"),
        (lambda path: path.write_text("x"), "is not a folder"),
        (lambda path: path.mkdir(), "holds no saved run"),
        (lambda path: (path / "trace.db").mkdir(parents=True), "holds no saved run"),
        (lambda path: (path.mkdir(), os.mkfifo(path / "trace.db")), "holds no saved run"),
        (lambda path: (path.mkdir(), (path / "trace.db").touch()), "stopped before anything was recorded"),
        (lambda path: (path.mkdir(), (path / "trace.db").write_bytes(b"no database " * 99)), "another program"),
        (lambda path: (path.mkdir(), (path / "trace.db").write_bytes(b"SQLite format 3\x00")), "another program"),
    ],
)
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, make, sentence):
    make(tmp_path / "run")
    with pytest.raises(InputError, match=sentence):
        read_trace(tmp_path / "run")


def test_a_name_no_file_can_have_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="Cannot read the run in"):
        read_trace(tmp_path / ("x" * 300))
    with pytest.raises(InputError, match="Cannot save a run in"):
        TraceWriter.create(tmp_path / ("x" * 300), plain_run())


def edited(folder: Path, script: str) -> Path:
    """A sound run after someone else's SQL."""
    return edit(save(folder, plain_run(), chain(2), plain_end()), script)


ENDLESS = "WITH RECURSIVE c(x) AS (VALUES (1) UNION ALL SELECT x + 1 FROM c) SELECT"


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("PRAGMA application_id = 0", "another program"),
        ("PRAGMA user_version = 99", "saved by a newer decodescope .format 99, this one reads up to 4."),
        ("DROP TABLE stage", "damaged .sqlite_schema."),
        ("ALTER TABLE node ADD COLUMN more", "damaged .sqlite_schema."),
        (f"DROP TABLE note; CREATE VIEW note AS {ENDLESS} x AS ordinal, 'a' AS text FROM c", "damaged"),
        ("UPDATE node SET parent_id = 1 WHERE id = 1", "damaged .node.parent_id"),
        ("UPDATE node SET parent_id = 1 WHERE id = 0", "damaged .node.parent_id"),
        ("UPDATE node SET step = 'one'", "damaged .node.step: str"),
        ("UPDATE node SET prob = x'00'", "damaged .node.prob: bytes"),
        ("UPDATE node SET delta_text = CAST(x'ff' AS TEXT)", "damaged .*UTF-8"),
        ("UPDATE candidate SET bytes_hex = 'zz'", "damaged .candidate.bytes_hex"),
        ("UPDATE stage SET filter_id = 77", "damaged .stage.filter_id"),
        ("UPDATE sampler_filter SET settings = '[]'", "damaged .sampler_filter.settings"),
        ("UPDATE sampler_filter SET settings = '{\"t\": 1e999}'", "damaged .sampler_filter.settings"),
        ("UPDATE setting SET value_type = 'bool' WHERE ordinal = 0", "damaged .setting.value_type"),
        ("UPDATE ending SET finish_reason = 'tired'", "damaged .ending.finish_reason"),
        ("UPDATE ending SET node_id = 7", "damaged .ending.node_id: 7"),
        ("DELETE FROM run", "stopped before anything was recorded"),
    ],
)
def test_a_database_that_lies_is_refused_in_one_sentence(tmp_path, script, sentence):
    folder = edited(tmp_path / "run", script)
    with pytest.raises(InputError, match=sentence):
        read_trace(folder)


def test_tables_and_views_of_ones_own_do_no_harm(tmp_path):
    folder = edited(
        tmp_path / "run", "CREATE VIEW mine AS SELECT * FROM node; CREATE INDEX quick ON candidate (token_id)"
    )
    assert len(read_trace(folder).steps) == 2


def test_a_missing_measurement_reads_as_nan(tmp_path):
    folder = edited(tmp_path / "run", "UPDATE node SET entropy_nats = NULL WHERE id = 1")
    assert [math.isnan(step.entropy_nats) for step in read_trace(folder).steps] == [False, True]


@pytest.fixture(scope="module")
def small_database(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "run"
    steps = [plain_step(n, n - 1 if n else None, candidates=3) for n in range(3)]
    return save(folder, plain_run(), steps, plain_end()) / "trace.db"


@given(
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8),
    kept=st.just(1.0) | st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_a_run_or_one_sentence_never_a_traceback(small_database, flips, kept):
    damaged = bytearray(small_database.read_bytes())
    used = [at for at, byte in enumerate(damaged) if byte]
    for place, byte in flips:
        damaged[used[place % len(used)]] = byte
    size = int(kept * len(damaged))
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "trace.db").write_bytes(damaged[:size])
        try:
            trace = read_trace(Path(scratch))
        except InputError as fault:
            assert scratch in str(fault) and str(fault).isprintable()
        else:
            assert isinstance(trace, Trace)
            trace.path()
            lines([trace.run, *trace.steps, trace.end])


# --- a disk that fills up

FILLING = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sample_records import plain_end, plain_run, plain_step
from decodescope.errors import ResourceError
from decodescope.trace.store import TraceWriter
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer = TraceWriter.create(folder, plain_run())
for number in range(5000):
    try:
        writer.write(plain_step(number, number - 1 if number else None))
    except ResourceError as fault:
        print(number, fault.key, str(number) in str(fault))
        break
writer.write(plain_step(9999, None))
writer.write_tensors({{}})
writer.finish(plain_end())
"""


def check_full(folder: Path, limit: int) -> None:
    command = [sys.executable, "-c", FILLING.format(here=str(HERE)), str(folder), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.stderr == ""
    count, key, counted = done.stdout.split()
    assert (key, counted) == ("trace.disk_full", "True")
    trace = read_trace(folder)
    assert int(count) > 3 and trace.steps == chain(int(count))
    assert trace.end.finish_reason == "interrupted"


@pytest.mark.parametrize("limit", [200_000, 4_500_000])  # before and after the first checkpoint
def test_a_file_size_limit_stops_the_run_once_and_keeps_its_steps(tmp_path, limit):
    check_full(tmp_path / "run", limit)


def test_a_full_disk_stops_the_run_once_and_keeps_its_steps(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root; runs where the tests may mount")
    try:
        check_full(mount / "run", 0)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_at_the_start_leaves_the_folder_empty(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(ResourceError, match="the first 0 steps are kept"):
            TraceWriter.create(tmp_path / "run", plain_run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path / "run") == []


# --- tensors


def test_tensors_come_back_with_their_place_in_the_run(tmp_path):
    arrays = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "one": np.float64(2.5)}
    mixed = {"q": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).T, "plain": np.ones(3, np.int64)}
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write_tensors(arrays)
        writer.write(plain_step(0, None))
        writer.write_tensors(mixed)
        writer.write_tensors({})
    index = {entry.name: entry for entry in saved_tensors(tmp_path / "run")}
    assert {name: (entry.node, entry.dtype, entry.shape, entry.bytes) for name, entry in index.items()} == {
        "embed": (None, "float32", (2, 3), 24), "one": (None, "float64", (), 8),
        "q": (0, "bfloat16", (2, 2), 8), "plain": (0, "int64", (3,), 24),
    }  # fmt: skip
    first = load_file(tmp_path / "run" / index["embed"].file)
    assert all(np.array_equal(first[name], arrays[name]) for name in arrays)
    second = load_torch_file(tmp_path / "run" / index["q"].file)
    assert torch.equal(second["q"], mixed["q"]) and torch.equal(second["plain"], torch.ones(3, dtype=torch.int64))
    assert names(tmp_path / "run" / "tensors") == ["0001.safetensors", "0002.safetensors"]


def test_a_block_that_does_not_fit_leaves_nothing_half_written(tmp_path):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    writer.write(plain_step(0, None))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ResourceError, match="the first 1 steps are kept"):
            writer.write_tensors({"big": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    assert names(tmp_path / "run" / "tensors") == []
    assert saved_tensors(tmp_path / "run") == []
    assert len(read_trace(tmp_path / "run").steps) == 1


@pytest.mark.parametrize("shape", ["[1", "{}", '["a"]'])
def test_a_shape_that_is_none_is_refused(tmp_path, shape):
    folder = edited(tmp_path / "run", f"INSERT INTO tensor VALUES (1, 'q', 0, 'float32', '{shape}', 4)")
    with pytest.raises(InputError, match=r"damaged .tensor\.shape"):
        saved_tensors(folder)


# --- what it costs


def test_importing_the_room_brings_no_torch():
    code = """
import sys
import decodescope.trace.store, decodescope.trace.export, decodescope.trace.lines, decodescope.trace.kept_logits
print(sorted({"torch", "numpy", "safetensors", "pydantic", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_committing_a_step_costs_well_under_a_millisecond(tmp_path):
    writer = TraceWriter.create(tmp_path / "run", plain_run())
    spent = []
    for step in chain(200):
        start = time.perf_counter()
        writer.write(step)
        spent.append(time.perf_counter() - start)
    writer.finish(plain_end())
    assert sorted(spent)[100] < 0.5e-3
