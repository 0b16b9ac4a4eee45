"""Recorded runs over HTTP: listed, read, followed while they grow, and nothing else of the disk."""

import json
import shutil
import threading

import pytest

from decodescope.cli.main import main
from decodescope.options import RunOptions
from decodescope.serving.archive import Archive
from decodescope.web.run_routes import Look, look_at


def completed(live, **more) -> str:
    with live.http() as http:
        answer = http.post("v1/completions", json={"prompt": "abc", "max_tokens": 5, "temperature": 0, **more})
    return answer.json()["choices"][0]["run_id"]


def events(text: str) -> list[tuple[int, dict]]:
    parts = [part.split("\n") for part in text.split("\n\n") if part.startswith("id: ")]
    return [(int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))) for number, data in parts]


def test_a_recorded_run_is_listed_and_reads_as_show_prints_it(live, runs_folder, capsys):
    run_id = completed(live)
    live.wait_idle()
    with live.http() as http:
        listed = http.get("runs").json()["runs"]
        lines = http.get(f"runs/{run_id}")
    assert [entry["running"] for entry in listed if entry["run_id"] == run_id] == [False]
    assert listed == sorted(listed, key=lambda entry: entry["run_id"], reverse=True)
    assert main(["show", str(runs_folder / run_id), "--json"]) == 0
    assert lines.text == capsys.readouterr().out
    assert lines.headers["content-type"].startswith("application/x-ndjson")


def test_a_finished_run_is_told_in_events_that_can_be_resumed(live):
    run_id = completed(live)
    live.wait_idle()
    with live.http() as http:
        whole = events(http.get(f"runs/{run_id}/events").text)
        rest = events(http.get(f"runs/{run_id}/events", headers={"Last-Event-ID": "2"}).text)
        over = http.get(f"runs/{run_id}/events", headers={"Last-Event-ID": "6"})
    assert [number for number, _ in whole] == list(range(7))
    assert [line["type"] for _, line in whole] == ["run", *["step"] * 5, "end"]
    assert rest == whole[3:]
    assert over.status_code == 204


@pytest.mark.parametrize("last", ["-1", "x", "1.5", "99999999999999999999", "१"])
def test_a_last_event_that_is_no_number_is_refused(live, last):
    run_id = completed(live)
    with live.http() as http:
        answer = http.get(f"runs/{run_id}/events", headers={"Last-Event-ID": last.encode()})
    assert answer.status_code == 400


def test_a_run_is_followed_while_it_grows_to_its_end(live):
    with live.openai().completions.create(
        model=live.served.model_name, prompt="x", max_tokens=100_000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        run_id = next(iter(stream)).choices[0].run_id
        with live.http() as http, http.stream("GET", f"runs/{run_id}/events") as followed:
            lines = followed.iter_lines()
            seen = [line for line in (next(lines) for _ in range(60)) if line.startswith("id: ")]
            threading.Timer(0.2, stream.close).start()
            rest = "\n".join(lines)
    assert seen == [f"id: {number}" for number in range(20)]
    assert json.loads(rest.rstrip().rpartition("data: ")[2])["finish_reason"] == "interrupted"


def test_a_run_that_has_only_just_begun_has_no_lines_yet_and_goes_on(tmp_path):
    archive = Archive(tmp_path, "all", 1 << 20)
    archive.options_for("20260101-000000-00000001", RunOptions())
    assert look_at(archive, "20260101-000000-00000001") == Look((), over=False)


@pytest.mark.parametrize("tail", ["", "/events"])
def test_a_run_that_cannot_be_read_does_not_say_where_it_lies(live, runs_folder, tail):
    folder = runs_folder / "20260101-000000-0000dead"
    folder.mkdir()
    (folder / "trace.db").write_bytes(b"no database")
    try:
        with live.http() as http:
            answer = http.get(f"runs/{folder.name}{tail}")
    finally:
        shutil.rmtree(folder)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "unreadable")
    assert str(runs_folder) not in answer.text


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../..",
        "..%2f..%2fetc",
        "%2e%2e",
        "x",
        "20260101-000000-00000000",
        "20260101-000000-0000000g",
        "a%00b",
        "%ff",
        "." * 200,
        "x" * 300,
    ],
)
@pytest.mark.parametrize("tail", ["", "/events"])
def test_a_name_that_is_no_run_of_ours_leads_nowhere(live, name, tail):
    with live.http() as http:
        answer = http.get(f"{live.url}runs/{name}{tail}")
    assert answer.status_code in (400, 404)
    assert "error" in answer.json()


def test_a_link_among_the_runs_is_none(live, runs_folder, tmp_path):
    run_id = completed(live)
    link = runs_folder / "20260101-000000-deadbeef"
    link.symlink_to(runs_folder / run_id)
    try:
        with live.http() as http:
            assert http.get(f"runs/{link.name}").status_code == 404
            assert link.name not in http.get("runs").text
    finally:
        link.unlink()


def test_where_nothing_is_recorded_there_are_no_runs(small):
    run_id = completed(small)
    with small.http() as http:
        assert http.get("runs").json() == {"runs": []}
        assert http.get(f"runs/{run_id}").status_code == 404
