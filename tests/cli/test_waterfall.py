"""`run --stages` and `show --stages`: every stage in its order, the candidates after each, and the draw."""

import io
import json
import re

import pytest

from decodescope import read_trace
from decodescope.analysis.metrics import drawn_stretch
from decodescope.cli.bars import stretch

DRAWN = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.2", "--seed", "5")


def steps_of(text: str) -> list[dict]:
    return [line for line in map(json.loads, text.splitlines()) if line["type"] == "step"]


def stage_rows(text: str) -> list[str]:
    """The names of the stages of the first step, as they stand in its table."""
    return re.findall(r"^ +\d (\w+) \S+ +[\d,]+ → ", text.split("\nstep 1 ")[0], re.MULTILINE)


@pytest.mark.parametrize("sampler", ["hf", "vllm", "llamacpp"])
def test_the_stages_stand_in_the_order_in_which_they_ran(cli, tiny, sampler):
    asked = ("run", "Hi", "-m", tiny, "-n", "1", "--stages", "--sampler", sampler, *DRAWN, "--min-p", "0.01")
    (step,) = steps_of(cli(*asked, "--json").out)
    names = [stage["name"] for stage in step["stages"]]
    assert len(names) == 5
    assert stage_rows(cli(*asked).out) == names


def test_a_stage_that_is_left_out_is_not_in_the_waterfall(cli, tiny):
    out = cli(
        "run", "Hi", "-m", tiny, "-n", "1", "--stages", *DRAWN, "--without", "top_k", "--without", "top_p"
    ).out
    assert stage_rows(out) == ["repetition_penalty", "temperature"]
    assert "without top_k,top_p" in out


def test_the_candidates_are_told_after_each_stage_from_raw_to_final(cli, tiny):
    for step in steps_of(cli("run", "Hi", "-m", tiny, "-n", "4", "--stages", "--json", *DRAWN).out):
        names = [stage["name"] for stage in step["stages"]]
        assert all(len(stage["probs"]) == len(step["candidates"]) for stage in step["stages"])
        for place, candidate in enumerate(step["candidates"]):
            probs = [stage["probs"][place] for stage in step["stages"]]
            assert probs[-1] == pytest.approx(candidate["prob_final"], rel=1e-5)
            first_zero = next((name for name, prob in zip(names, probs, strict=True) if prob == 0), None)
            assert first_zero == candidate["removed_by"]


def test_the_table_heads_raw_and_final_and_shows_what_was_removed(cli, tiny):
    asked = ("run", "Hi", "-m", tiny, "-n", "1", "--stages", "--candidates", "60", *DRAWN)
    out = cli(*asked).out
    assert re.search(r"% after stage +raw +1 +2 +3 +final\n", out)
    (step,) = steps_of(cli(*asked, "--json").out)
    removed = [c for c in step["candidates"] if c["removed_by"]]
    assert removed
    assert len(re.findall(r" –$", out, re.MULTILINE)) == len(removed)


def test_the_draw_fell_where_the_step_says(cli, tiny, tmp_path):
    out = cli("run", "Hi", "-m", tiny, "-n", "3", "--stages", "--save", tmp_path / "run", *DRAWN).out
    path = read_trace(tmp_path / "run").path()
    told = re.findall(r"the draw fell on .*: ([\d.<]+) % to ([\d.>]+) % of the final distribution", out)
    assert len(told) == len(path) == 3
    for (start, stop), step in zip(told, path, strict=True):
        low, high = drawn_stretch(step)
        assert low == step.mass_above and high == pytest.approx(low + step.prob_final)
        assert float(start.lstrip("<")) == pytest.approx(100 * low, abs=0.06)
        assert float(stop.lstrip(">")) == pytest.approx(100 * high, abs=0.06)


def test_greedy_steps_and_steps_picked_by_hand_say_that_nothing_was_drawn(cli, tiny, tmp_path, monkeypatch):
    greedy = cli("run", "Hi", "-m", tiny, "-n", "1", "--stages").out
    assert "greedy: " in greedy and "nothing is drawn" in greedy and "no stage is in force" in greedy
    monkeypatch.setattr("sys.stdin", io.StringIO("2\nq\n"))
    cli("run", "Hi", "-m", tiny, "-n", "1", "--stages", "--step", *DRAWN, "--save", tmp_path / "run")
    shown = cli("show", tmp_path / "run", "--step", "0", "--stages").out
    assert "picked by hand: " in shown and "the draw fell" not in shown


def test_a_saved_waterfall_is_drawn_as_it_was_seen(cli, tiny, tmp_path):
    seen = cli("run", "Hi", "-m", tiny, "-n", "2", "--stages", "--save", tmp_path / "run", *DRAWN)
    assert cli("show", tmp_path / "run", "--stages").out == seen.out
    one = cli("show", tmp_path / "run", "--stages", "--step", "1").out
    assert one.startswith("step 1 ") and one in seen.out


def test_a_run_without_the_probabilities_after_stages_shows_raw_and_final_and_says_so(cli, tiny, tmp_path):
    cli("run", "Hi", "-m", tiny, "-n", "1", "--save", tmp_path / "run", *DRAWN)
    shown = cli("show", tmp_path / "run", "--stages").out
    assert "were not recorded" in shown
    assert re.search(r"% after stage +raw +final\n", shown)
    assert stage_rows(shown) == ["repetition_penalty", "temperature", "top_k", "top_p"]


def test_a_batch_shows_the_waterfall_of_every_row(cli, tiny, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\nyou\n")
    out = cli("run", "-m", tiny, "--prompts", tmp_path / "prompts.txt", "-n", "1", "--stages", *DRAWN).out
    assert out.count("the draw fell on") == 2


def test_raw_and_final_are_never_shown_without_their_names(cli, tiny):
    step = cli("run", "Hi", "-m", tiny, "-n", "1", *DRAWN).out.split("step 0")[1].splitlines()
    assert "raw p " in step[0]
    assert any(line.endswith(" final") for line in step[1:6])


@pytest.mark.parametrize(
    ("start", "stop", "drawn"),
    [(0, 1, "████"), (0, 0.25, "█░░░"), (0.5, 0.75, "░░█░"), (0.6, 0.6000001, "░░█░"), (1, 1, "░░░█")],
)
def test_a_stretch_stands_out_however_short(start, stop, drawn):
    assert stretch(start, stop, 4) == drawn
