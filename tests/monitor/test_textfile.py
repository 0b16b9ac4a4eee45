"""Metrics of finished runs: they agree with the traces, whatever ended the run."""

import json
import shutil
import subprocess

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from decodescope import RunOptions, Session
from decodescope.cli.main import main
from decodescope.errors import FindingError, InputError
from decodescope.monitor.series import PREFIX
from decodescope.monitor.textfile import metrics_of, textfile, write_whole
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def session(model: str) -> Session:
    return Session.open(model)


def values(text: str) -> dict[str, float]:
    """Values by name and label values, without the model's name and the prefix."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[" ".join([sample.name.removeprefix(PREFIX), *labels])] = sample.value
    return found


def run_lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict], list[dict], list[dict]]:
    assert main([*arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return tuple([line for line in lines if line["type"] == kind] for kind in ("run", "step", "end"))


def check(found: dict[str, float], runs: list[dict], steps: list[dict], ends: list[dict]) -> None:
    later = [step["timing"]["total_s"] for step in steps if step["step"]]
    assert found["prompt_tokens_total"] == sum(end["prompt_tokens"] for end in ends)
    assert found["generation_tokens_total"] == sum(end["new_tokens"] for end in ends) == len(steps)
    assert found["request_success_total length"] == len(ends)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(sum(end["ttft_s"] for end in ends))
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(sum(later))
    assert found["inter_token_latency_seconds_count"] == len(later)
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(sum(s["timing"]["total_s"] for s in steps))
    assert found["entropy_nats_sum"] == pytest.approx(sum(step["entropy_nats"] for step in steps))
    assert found["process_peak_resident_bytes"] == max(end["peak_rss_bytes"] for end in ends)
    assert found["prefix_cache_query_tokens_total"] == found["request_queue_time_seconds_count"] == 0


def test_the_file_of_one_run_agrees_with_what_the_run_says(model, tmp_path, capsys):
    path = tmp_path / "run.prom"
    told = run_lines(capsys, "run", "Hi", "-m", model, "-n", "9", "--ignore-eos", "--metrics-textfile", str(path))
    check(values(path.read_text()), *told)
    assert [each.name for each in tmp_path.iterdir()] == ["run.prom"], "no half-written file is left"


def test_the_file_of_a_batch_agrees_with_all_rows(model, tmp_path, capsys):
    path, prompts = tmp_path / "batch.prom", tmp_path / "prompts.txt"
    prompts.write_text("Hi\nsomewhat longer\nx\n")
    path.write_text("what an earlier job left")
    asked = ("run", "--prompts", str(prompts), "-m", model, "-n", "7", "--ignore-eos")
    told = run_lines(capsys, *asked, "--metrics-textfile", str(path))
    check(values(path.read_text()), *told)


def test_a_run_that_was_interrupted_leaves_its_metrics(session, tmp_path):
    path = tmp_path / "run.prom"
    live = session.start([session.prompt("Hi")], RunOptions(max_new_tokens=9, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt), textfile(path, live.traces):
        try:
            for _, step in live.steps():
                if step.step == 3:
                    raise KeyboardInterrupt
        finally:
            live.finish("interrupted")
    found = values(path.read_text())
    assert found["request_success_total abort"] == 1
    assert found["generation_tokens_total"] == 4
    assert found["repetition_ratio_count"] == 0


def test_logits_that_are_not_finite_are_counted(model, tmp_path, capsys):
    session = Session.open(model)
    path = tmp_path / "run.prom"
    with torch.no_grad():
        session.model.model.norm.weight[0] = float("nan")
    live = session.start([session.prompt("Hi")] * 2, RunOptions(max_new_tokens=9))
    with pytest.raises(FindingError), textfile(path, live.traces):
        list(live.steps())
    found = values(path.read_text())
    assert found["request_success_total error"] == 2
    assert found["nonfinite_logits_total"] == 1
    assert found["generation_tokens_total"] == 0


def test_a_saved_run_comes_to_the_same(session, model, tmp_path):
    from decodescope import read_trace

    trace = session.run("Hi", max_new_tokens=6, save=tmp_path / "run")
    assert metrics_of([trace]).exposition() == metrics_of([read_trace(tmp_path / "run")]).exposition()


def test_a_run_that_has_not_ended_is_counted_as_far_as_it_came(session):
    live = session.start([session.prompt("Hi")], RunOptions(max_new_tokens=9, ignore_eos=True))
    steps = live.steps()
    next(steps), next(steps)
    found = values(metrics_of(live.traces).exposition()[0].decode())
    assert found["generation_tokens_total"] == 2
    assert sum(count for name, count in found.items() if name.startswith("request_success_total")) == 0
    assert "process_peak_resident_bytes" not in found


@pytest.mark.parametrize("name", ["none/run.prom", ""])
def test_a_file_that_cannot_be_is_refused_before_the_model_is_loaded(tmp_path, capsys, name):
    assert main(["run", "Hi", "-m", "no such model", "--metrics-textfile", str(tmp_path / name)]) == 2
    assert "Metrics cannot be written" in capsys.readouterr().err


def test_a_conversation_writes_no_metrics(capsys, tmp_path):
    assert main(["run", "--chat-loop", "--metrics-textfile", str(tmp_path / "x.prom")]) == 2
    assert "--metrics-textfile" in capsys.readouterr().err


def test_a_file_that_can_no_longer_be_written_is_one_sentence_and_the_old_one_stays(tmp_path):
    path = tmp_path / "run.prom"
    path.mkdir()
    with pytest.raises(InputError, match="could not be written"):
        write_whole(path, b"x")
    assert [each.name for each in tmp_path.iterdir()] == ["run.prom"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool; ends where it is installed")
def test_promtool_finds_nothing_to_mend_in_the_file(session):
    text = metrics_of([session.run("Hi", max_new_tokens=6)]).exposition()[0]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
