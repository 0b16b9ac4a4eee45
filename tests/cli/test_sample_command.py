"""`sample`: table, texts and why they part, JSON, Parquet, the picture, re-rolled runs, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "sample.json"
PLAIN = ("--raw", "-n", "8", "--ignore-eos")
GRID = ("--grid", "preset=greedy,checkpoint-greedy", "--grid", "temperature=0.3,1.5", "--grid", "top_p=0.9")


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tiny) -> Path:
    from decodescope.cli.main import main

    folder = tmp_path_factory.mktemp("saved") / "run"
    arguments = ["run", "Hi", "-m", tiny, *PLAIN, "--temperature", "0.9", "--seed", "4"]
    assert main([*arguments, "--save", str(folder), "--keep", "logits", "--json"]) == 0
    return folder


def test_json_holds_a_row_for_every_setting_and_fits_the_schema(cli, tiny):
    found = checked(cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--seeds", "42,7", "--json").out)
    assert [(row["name"], row["seed"]) for row in found["rows"]] == [
        ("greedy", None), ("checkpoint-greedy", None),
        ("temperature=0.3 top_p=0.9", 42), ("temperature=0.3 top_p=0.9", 7),
        ("temperature=1.5 top_p=0.9", 42), ("temperature=1.5 top_p=0.9", 7),
    ]  # fmt: skip
    first = found["rows"][0]
    assert first["parts_at"] is None and found["complete"] and found["seconds"] > 0
    for row in found["rows"]:
        assert len(row["token_ids"]) == len(row["entropy_nats"]) == 8
        pairs = zip(row["token_ids"], first["token_ids"], strict=True)
        assert row["parts_at"] == next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert [setting["seeds"] for setting in found["summary"]] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("settings side by side", "parts at step", "in the first row", "over seeds", "read once")),
        ("zh", ("采样设置并排比较", "步分开", "首行", "跨种子", "只读一次")),
    ],
)
def test_figures_texts_and_partings_are_drawn_in_both_languages(cli, tiny, language, words):
    out = cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--seeds", "42,7", "--lang", language).out
    for word in words:
        assert word in out
    assert "temperature=0.3 → top_p=0.9" in out
    table = out.splitlines()[2:9]
    assert max(map(len, table)) <= 120 and all("…" not in line for line in table)


def test_a_row_that_draws_without_a_stage_in_force_is_not_called_greedy(cli, tiny):
    out = cli("sample", "Hi", "-m", tiny, *PLAIN, "--grid", "temperature=0,1", "--seeds", "3").out
    assert "temperature=0  most probable token" in out
    assert "temperature=1  seed=3  drawn from the raw distribution" in out


def test_figures_stay_whole_on_a_narrow_terminal(cli, tiny, monkeypatch):
    monkeypatch.setattr("decodescope.cli.console.PLAIN_WIDTH", 80)
    first, *_ = rows = json.loads(cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--json").out)["rows"]
    out = cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID).out
    assert f" {first['entropy_nats_mean']:.3f} " in out and "…" not in out.partition("texts;")[0]
    assert all(f"{place} {row['name']}" in out for place, row in enumerate(rows))


def test_one_seed_needs_no_means_over_seeds(cli, tiny):
    out = cli("sample", "Hi", "-m", tiny, *PLAIN, "--grid", "temperature=0.5").out
    assert "over seeds" not in out and "seed=0" in out


def test_parquet_holds_the_same_rows_with_a_column_for_each_setting(cli, tiny, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="ends when the parquet extra is installed")
    file = tmp_path / "rows.parquet"
    done = cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--seeds", "42,7", "--json", "--parquet", file)
    found, read = checked(done.out)["rows"], parquet.read_table(file).to_pylist()
    assert [row["token_ids"] for row in read] == [row["token_ids"] for row in found]
    assert [row["temperature"] for row in read] == [0, 0, 0.3, 0.3, 1.5, 1.5]
    assert [row["parting"] for row in read] == [row["parting"] for row in found]
    assert read[2]["top_p"] == 0.9 and read[2]["sampler"] == "hf" and read[0]["seed"] is None
    assert "rows.parquet" in done.err


def test_the_picture_has_a_line_for_each_setting(cli, tiny, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    picture = tmp_path / "steps.svg"
    done = cli(
        "sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--seeds", "1,2", "--image", picture, "--lang", "zh", "--json"
    )
    assert done.code == 0 and "steps.svg" in done.err
    words = "".join(ElementTree.parse(picture).getroot().itertext())
    assert words.count("temperature=0.3 top_p=0.9") == 1
    assert "熵（nat）" in words and "最高概率" in words


def test_rows_are_saved_as_runs_that_show_can_draw(cli, tiny, tmp_path):
    folder = tmp_path / "rows"
    found = checked(cli("sample", "Hi", "-m", tiny, *PLAIN, *GRID, "--save", folder, "--json").out)
    assert sorted(path.name for path in folder.iterdir()) == ["0000", "0001", "0002", "0003"]
    shown = [json.loads(line) for line in cli("show", folder / "0003", "--json").out.splitlines()]
    steps = [line["token_id"] for line in shown if line["type"] == "step"]
    assert steps == found["rows"][3]["token_ids"]


def test_a_checkpoint_without_settings_is_told_of(cli, tiny, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in Path(tiny).iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    out = cli("sample", "Hi", "-m", folder, *PLAIN, "--grid", "preset=greedy,checkpoint").out
    assert "the checkpoint brings no sampling settings" in out


def test_a_saved_run_is_rerolled_without_its_model(cli, run_folder):
    grid = ("--grid", "temperature=0.9,50", "--seeds", "4")
    found = checked(cli("sample", "--from", run_folder, *grid, "--json").out)
    own, hot = found["rows"]
    assert (own["exact_steps"], own["parts_at"], own["finish_reason"]) == (8, None, "length")
    assert hot["exact_steps"] == hot["parts_at"] == len(hot["token_ids"]) < 8
    out = cli("sample", "--from", run_folder, *grid).out
    assert "Exact to the end: the same 8 tokens" in out and "in the run" in out
    assert f"Exact for {hot['exact_steps']} steps" in out
    assert "直到结尾都精确" in cli("sample", "--from", run_folder, *grid, "--lang", "zh").out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--grid KNOB"),
        (("--grid", ""), "nothing to compare"),
        (("--grid", "temperature="), "lacks a value"),
        (("--grid", "heat=3"), "heat"),
        (("--grid", "temperature=hot"), "hot"),
        (("--grid", "temperature=-1"), "Temperature"),
        (("--grid", "preset=best"), "best"),
        (("--grid", "top_k=3", "--seeds", "-4"), "-4"),
        (("--grid", "top_k=3", "--seeds", "4,x"), "4,x"),
        (("--grid", "top_k=3", "--seeds", ",".join(map(str, range(2000)))), "2000 rows"),
        (("--grid", "top_k=3", "-n", "0"), "--max-new-tokens"),
        (("--grid", "top_k=3", "--engine", "vllm"), "native"),
        (("--grid", "top_k=3", "--image", "curve.gif"), "curve.gif"),
        (("--grid", "top_k=3", "--parquet", "none/rows.parquet"), "none/rows.parquet"),
        (("--grid", "top_k=3", "--parquet", "."), "Parquet"),
        (("--grid", "top_k=3", "--dtype", "int3"), "float32"),
        (("--grid", "top_k=3", "--from", "somewhere"), "prompt"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    done = cli("sample", "Hi", "-m", tiny, *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_neither_prompt_nor_run_and_runs_that_cannot_be_rerolled_are_one_sentence(cli, tiny, tmp_path):
    grid = ("--grid", "top_k=3")
    assert "PROMPT" in cli("sample", *grid).fault
    assert "save" in cli("sample", "--from", tmp_path / "none", *grid).fault
    for more in (("-m", tiny), ("-n", "3"), ("--dtype", "bfloat16")):
        assert "make no sense beside it: --" in cli("sample", "--from", tmp_path / "none", *grid, *more).fault
    folder = tmp_path / "run"
    cli("run", "Hi", "-m", tiny, *PLAIN, "--save", folder, "--json")
    done = cli("sample", "--from", folder, *grid)
    assert "--keep logits" in done.fault and done.code == 2
    assert "--keep logits" in cli("sample", "--from", folder, *grid, "--lang", "zh").fault


def test_without_pyarrow_the_sentence_says_what_to_install(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("decodescope.experiments.sample_parquet.find_spec", lambda name: None)
    done = cli("sample", "Hi", "-m", tiny, "--grid", "top_k=3", "--parquet", tmp_path / "rows.parquet")
    assert "decodescope[parquet]" in done.fault and done.code == 2


def test_tokens_cannot_command_the_terminal(cli, tiny):
    out = cli(
        "sample", "\x1b[31m\u202e", "-m", tiny, "--raw", "-n", "40", "--ignore-eos", "--grid", "temperature=3"
    ).out
    assert not {c for c in out if (ord(c) < 32 and c != "\n") or c == "\u202e"}


def test_an_interrupted_run_shows_what_it_had_decoded(tiny):
    arguments = ["sample", "Hi", "-m", tiny, "-n", "400", "--ignore-eos", "--grid", "temperature=0.5"]
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTING, *arguments, "--seeds", ",".join(map(str, range(12)))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job hands down an ignored SIGINT, which Python would respect.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in out and "Stopped early" in out
    assert err.startswith("decodescope: error: Interrupted") and len(err.splitlines()) == 1


# Ctrl-C after the fortieth token, whatever the machine's speed.
_INTERRUPTING = """
import os, signal, sys
from decodescope.cli.console import StderrReport
def told(self, done, most):
    if done == 40:
        os.kill(os.getpid(), signal.SIGINT)
StderrReport.decoding = told
from decodescope.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
