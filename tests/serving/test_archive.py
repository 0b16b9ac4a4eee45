"""Laws of the archive: which requests are recorded, that they read as any run does, and what makes way."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving_parts import answers, ask, order

from decodescope.errors import InputError, ResourceError
from decodescope.serving.archive import Archive
from decodescope.session import Session
from decodescope.trace.saved import read_trace
from decodescope.trace.store import TraceWriter

GIB = 1 << 30


def test_a_recorded_request_reads_as_what_its_client_got(session, serve, tmp_path):
    archive = Archive(tmp_path / "runs", "all", GIB)
    engine = serve(archive)
    clients = ask(engine, order(session, "a", 5), order(session, "b", 7))
    for client in clients:
        end = client.wait()
        trace = read_trace(archive.folder(client.ticket.run_id))
        assert trace.token_ids == client.ids and trace.end.text == end.text
        assert trace.end.finish_reason == "length" and "note.served" in trace.run.notes
        assert len(trace.steps[0].candidates) == 50
    engine.close()
    assert [(entry.run_id, entry.running) for entry in archive.entries()] == [
        (name, False) for name in sorted((client.ticket.run_id for client in clients), reverse=True)
    ]


def test_a_share_of_requests_is_recorded(session, serve, tmp_path):
    archive = Archive(tmp_path, "sample=0.5", GIB)
    engine = serve(archive)
    each = order(session, "a", 1)
    for _ in range(5):
        answers(engine, [each] * 20)
    engine.close()
    assert 25 <= len(archive.entries()) <= 75  # of 100; outside once in a million


def test_on_alert_keeps_the_runs_that_loop_or_that_a_guard_touched_and_no_others(session, serve, tmp_path):
    archive = Archive(tmp_path, "on-alert", GIB)
    looping = Session.open(str(session.files.path))
    looping.model.lm_head.weight.data.zero_()  # the same token again and again
    kept = []
    guarded = {"guards": ("high_entropy=0.01:warn",)}
    for of, tokens, options in ((session, 20, {}), (looping, 100, {}), (session, 20, guarded)):
        engine = serve(archive, of=of)
        (client,) = ask(engine, order(of, "a", tokens, **options))
        client.wait()
        engine.close()
        kept.append(client)
    wanted = kept[1:]
    assert {entry.run_id for entry in archive.entries()} == {client.ticket.run_id for client in wanted}
    for client in wanted:
        trace = read_trace(archive.folder(client.ticket.run_id))
        assert trace.token_ids == client.ids and trace.end.finish_reason == "length"


def test_the_oldest_make_way_beyond_a_size_but_none_that_is_running(session, serve, tmp_path):
    archive = Archive(tmp_path, "all", GIB)
    engine = serve(archive)
    answers(engine, [order(session, "a", 3)])
    engine.close()
    archive.most_bytes = 2 * archive.entries()[0].size_bytes + 1000
    engine = serve(archive)
    long = ask(engine, order(session, "a", 400))[0]
    assert long.first.wait(30)
    for _ in range(4):
        answers(engine, [order(session, "a", 3)])
    assert long.ticket.run_id in {entry.run_id for entry in archive.entries()}
    long.wait()
    engine.close()
    assert sum(entry.size_bytes for entry in archive.entries()) <= archive.most_bytes


@pytest.mark.parametrize("rule", ["", "some", "sample=", "sample=0", "sample=1.5", "sample=nan", "sample=x"])
def test_a_rule_that_is_none_is_refused(rule, tmp_path):
    with pytest.raises(InputError, match="sample="):
        Archive(tmp_path, rule, GIB)


@pytest.mark.parametrize(
    "name", ["..", "../x", "/etc", ".", "", "20261130-101010-0123456789", "a" * 5000, "x\x00y"]
)
def test_only_the_name_of_a_run_leads_to_a_folder(name, tmp_path):
    archive = Archive(tmp_path / "runs", "all", GIB)
    with pytest.raises(InputError, match="No recorded run"):
        archive.folder(name)


def test_a_link_that_looks_like_a_run_is_none(tmp_path):
    archive = Archive(tmp_path / "runs", "all", GIB)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trace.db").touch()
    (tmp_path / "runs" / "20261130-101010-01234567").symlink_to(elsewhere)
    assert archive.entries() == []
    with pytest.raises(InputError):
        archive.folder("20261130-101010-01234567")


def test_a_killed_server_loses_no_committed_step_and_starts_again(session, serve, tmp_path):
    script = """
import sys
from pathlib import Path
from decodescope.options import RunOptions
from decodescope.serving.archive import Archive
from decodescope.serving.engine import Engine
from decodescope.serving.orders import Order, Plan
from decodescope.session import Session
session = Session.open(sys.argv[1])
engine = Engine(session, Plan(cache_bytes=1 << 22), archive=Archive(Path(sys.argv[2]), "all", 1 << 30))
engine.start()
def told(what):
    print(getattr(what, "step", "end"), flush=True)
for prompt in [session.prompt(text) for text in ("a", "b", "c")]:
    engine.submit(Order(prompt, RunOptions(max_new_tokens=400, ignore_eos=True)), told)
engine._thread.join()
"""
    command = [sys.executable, "-c", script, str(session.files.path), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [next(process.stdout) for _ in range(60)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    archive = Archive(tmp_path, "all", GIB)
    traces = [read_trace(archive.folder(entry.run_id)) for entry in archive.entries()]
    assert [trace.end.finish_reason for trace in traces] == ["interrupted"] * 3
    whole = [line for line in told if line.endswith("\n")]
    assert sum(len(trace.steps) for trace in traces) >= len(whole)
    assert answers(serve(archive), [order(session, "a", 3)])[0]
    assert len(archive.entries()) == 4


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        Archive(tmp_path / "file" / "runs", "all", GIB)


def test_a_run_is_listed_while_it_is_written(session, serve, tmp_path):
    archive = Archive(tmp_path, "all", GIB)
    engine = serve(archive)
    (client,) = ask(engine, order(session, "a", 400))
    assert client.first.wait(30)
    (entry,) = archive.entries()
    assert entry.running and entry.size_bytes > 0
    assert read_trace(archive.folder(entry.run_id)).end.finish_reason == "interrupted"  # so far
    client.wait()
    for _ in range(200):
        if not archive.entries()[0].running:
            return
        time.sleep(0.01)
    raise AssertionError("still said to be running")


def test_a_disk_that_fails_costs_the_record_and_never_the_answer(session, serve, tmp_path, caplog):
    archive = Archive(tmp_path / "runs", "all", GIB)
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").touch()  # where the folder was
    engine = serve(archive)
    assert answers(engine, [order(session, "a", 5)]) == [
        session.run("a", max_new_tokens=5, ignore_eos=True).token_ids
    ]
    assert "recorded no further" in caplog.text
    assert not archive._records


def test_a_disk_that_fails_in_mid_run_leaves_what_was_committed(session, serve, tmp_path, monkeypatch):
    archive = Archive(tmp_path, "all", GIB)
    write, steps = TraceWriter.write, []

    def full(writer, step):
        steps.append(step)
        if len(steps) == 4:
            raise ResourceError("trace.disk_full", path=writer.folder, steps=3)
        write(writer, step)

    monkeypatch.setattr(TraceWriter, "write", full)
    (client,) = ask(serve(archive), order(session, "a", 9))
    assert client.wait().finish_reason == "length" and len(client.ids) == 9
    trace = read_trace(archive.folder(client.ticket.run_id))
    assert trace.token_ids == client.ids[:3] and trace.end.finish_reason == "interrupted"
    assert len(steps) == 4 and not archive._records


def test_a_folder_named_after_no_moment_is_no_run(tmp_path):
    archive = Archive(tmp_path, "all", GIB)
    odd = tmp_path / "99999999-999999-deadbeef"
    odd.mkdir()
    (odd / "trace.db").touch()
    assert archive.entries() == []
