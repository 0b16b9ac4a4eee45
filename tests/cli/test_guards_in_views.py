"""`run --guard`: what guards do is shown under its step, in the summary and in JSON; good text is left alone."""

import json

import pytest

from decodescope import read_trace

FIRING = "entropy=5.56:0.9,window=3"  # below what 260 tokens can reach at all


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_intervention_stands_under_its_step_and_in_the_summary(cli, tiny, tmp_path):
    seen = cli("run", "Hi", "-m", tiny, "-n", "6", "--ignore-eos", "--guard", FIRING, "--save", tmp_path / "run")
    (block,) = [part for part in seen.out.split("\nstep ") if "! guard entropy" in part]
    assert block.startswith("2 ")
    assert "threshold 5.56 (nats, mean raw entropy): temperature 0.9 from the next step on" in block
    assert f"guards (entropy in nats): {FIRING}" in seen.out
    assert "guards stepped in         entropy: 1 × changed the temperature" in seen.out
    assert cli("show", tmp_path / "run").out == seen.out


def test_what_a_guard_did_is_in_the_json_of_its_step_and_in_force_from_the_next(cli, tiny):
    _, *steps, end = lines_of(
        cli("run", "Hi", "-m", tiny, "-n", "6", "--ignore-eos", "--guard", FIRING, "--json").out
    )
    (done,) = steps[2]["interventions"]
    assert (done["guard"], done["action"], done["temperature"], done["threshold"]) == (
        "entropy",
        "temperature",
        0.9,
        5.56,
    )
    assert done["measured"] == pytest.approx(sum(step["entropy_nats"] for step in steps[:3]) / 3)
    assert [step["mass_above"] is None for step in steps] == [True, True, True, False, False, False]
    assert end["stop_guard"] is None


@pytest.mark.parametrize(("language", "said"), [("en", "stopped by guard entropy"), ("zh", "由守卫 entropy 停止")])
def test_a_run_that_a_guard_ended_says_so(cli, tiny, language, said):
    stopping = ("--guard", "entropy=5.56:stop,window=3")
    done = cli("run", "Hi", "-m", tiny, "-n", "9", "--ignore-eos", *stopping, "--lang", language)
    assert said in done.out and done.code == 0


def test_guards_that_did_nothing_are_said_to_have_done_nothing(cli, tiny):
    out = cli("run", "Hi", "-m", tiny, "-n", "3", "--guard", "loop").out
    assert "guards stepped in         never" in out


def test_a_batch_shows_interventions_under_the_rows_step(cli, tiny, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\nyou\n")
    asked = ("--prompts", tmp_path / "prompts.txt", "-n", "4", "--ignore-eos", "--guard", FIRING)
    assert cli("run", "-m", tiny, *asked).out.count("! guard entropy") == 2


@pytest.mark.parametrize("drawing", [[], ["--temperature", "0.9", "--seed", "6"]])
@pytest.mark.parametrize("prompt", ["Hi", "春天", "What is two and two?"])
def test_text_that_meets_no_rule_is_left_alone(cli, tiny, prompt, drawing):
    asked = ("run", prompt, "-m", tiny, "-n", "40", "--ignore-eos", "--json", "--candidates", "1", *drawing)
    plain = lines_of(cli(*asked).out)[1:-1]
    guarded = lines_of(cli(*asked, "--guard", "loop", "--guard", "entropy=1.5:0.9").out)[1:-1]
    assert [step["token_id"] for step in guarded] == [step["token_id"] for step in plain]
    assert [step["candidates"] for step in guarded] == [step["candidates"] for step in plain]
    assert not any(step["interventions"] for step in guarded)


def test_a_real_loop_is_ended_and_the_trace_says_by_what(cli, small_path, tmp_path):
    prompt = "one two three one two three one two three one two three one two three"
    asked = ("run", prompt, "--raw", "-m", small_path, "-n", "90", "--ignore-eos", "--candidates", "1")
    done = cli(*asked, "--guard", "loop", "--save", tmp_path / "run")
    trace = read_trace(tmp_path / "run")
    assert "stopped by guard loop" in done.out
    assert trace.end.stop_guard == "loop" and len(trace.path()) < 90
    (last,) = trace.path()[-1].interventions
    assert last.action == "stop" and last.measured >= last.threshold == 64
    assert not any(step.interventions for step in trace.path()[:-1])
