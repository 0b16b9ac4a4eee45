"""`run --step` and `--break`: what the reader can do between tokens, and where a run pauses by itself."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodescope import read_trace
from decodescope.trace.records import Trace
from tiny_model import make_tiny_model


@pytest.fixture
def stepped(cli, tiny, tmp_path, monkeypatch) -> Callable[..., tuple[str, Trace]]:
    """Run with answers from standard input: what was printed, and the trace."""

    def run(answers: str, *options: str) -> tuple[str, Trace]:
        monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        done = cli("run", "Hi", "-m", tiny, "--ignore-eos", "--save", folder, *options)
        assert done.code == 0, done.err
        return done.out, read_trace(folder)

    return run


def pauses(out: str) -> list[int]:
    return [int(step) for step in re.findall(r"paused at step (\d+)", out)]


def test_typed_text_is_shown_as_tokens_and_laid_down_one_after_the_other(stepped):
    out, trace = stepped("=a b\n\nq\n", "--step")
    assert "3 token(s): a(64) ␣(220) b(65)" in out
    path = trace.path()
    assert [step.text for step in path[:3]] == ["a", " ", "b"]
    assert [step.forced for step in path] == [True, True, True, False]
    assert trace.text.startswith("a b")


def test_a_pause_comes_only_behind_the_whole_typed_text(stepped):
    _, trace = stepped("=abc\nq\n", "--step")
    assert [step.text for step in trace.path()] == ["a", "b", "c"]


def test_a_token_can_be_named_by_its_id(stepped):
    _, trace = stepped("#65\nq\n", "--step")
    assert trace.token_ids == [65]


def test_what_cannot_be_laid_down_changes_nothing_and_is_said(stepped):
    out, trace = stepped("#260\n=\n#x\nq\n", "--step")
    assert "There is no token 260" in out and "no text behind the =" in out and "type Enter" in out
    assert len(trace.steps) == 1 and not trace.steps[0].forced


def test_a_token_picked_from_beyond_the_candidates_is_no_rank_to_pick(stepped):
    out, _ = stepped("#65\n?x\nq\n", "--step", "--candidates", "1", "--temperature", "0")
    assert "(1 to 1)" in out


def test_help_tells_every_key(stepped):
    out, _ = stepped("?\nq\n", "--step")
    for key in ("Enter:", "3:", "#123:", "=text:", "b:", "c:", "q:"):
        assert f"  {key}" in out


def test_going_back_over_typed_text_takes_it_back(stepped):
    _, trace = stepped("=ab\nb\nb\n\nq\n", "--step")
    assert [step.forced for step in trace.path()] == [True, False]
    assert trace.path()[0].text == "a"


def test_c_runs_on_to_the_end_where_there_is_no_break(stepped):
    _, trace = stepped("c\n", "--step", "-n", "6")
    assert len(trace.path()) == 6 and trace.end.finish_reason == "length"


def test_the_end_of_the_input_quits(stepped):
    _, trace = stepped("", "--step")
    assert len(trace.path()) == 1 and trace.end.finish_reason == "interrupted"


def test_without_a_pause_the_run_is_the_one_without_breaks(stepped):
    _, trace = stepped("", "--break", "rank>1", "--break", "margin<0.0000000001", "-n", "6")
    _, plain = stepped("", "-n", "6")
    assert trace.token_ids == plain.token_ids and trace.end.finish_reason == "length"


def test_a_break_alone_runs_to_it_and_enter_goes_one_step_and_c_to_the_next(stepped):
    _, plain = stepped("", "-n", "12")
    entropies = [step.entropy_nats for step in plain.path()]
    limit = sorted(entropies)[-3] - 1e-9  # three of twelve steps are above it
    met = [place for place, entropy in enumerate(entropies) if entropy > limit]
    out, trace = stepped("c\nc\nc\n", "-n", "12", "--break", f"entropy>{limit!r}")
    assert pauses(out) == met
    assert len(trace.path()) == 12
    for place in met:
        assert f"(raw entropy {entropies[place]:.3f} nats)" in out
    out, trace = stepped("\nq\n", "-n", "12", "--break", f"entropy>{limit!r}")
    assert len(trace.path()) == met[0] + 2


def test_each_condition_pauses_at_the_first_step_that_meets_it_and_tells_its_value(stepped):
    _, plain = stepped("", "-n", "8", "--temperature", "1.5", "--seed", "3")
    path = plain.path()
    token = path[4]
    rank = next(step for step in path if step.rank > 3)
    margin = next(step for step in path if step.margin_logits < 0.5)
    expected = {
        "rank>3": (rank.step, f"chosen rank {rank.rank}"),
        "margin<0.5": (margin.step, f"margin {margin.margin_logits:.3f} logits"),
        f"token={token.token_id}": ([s.token_id for s in path].index(token.token_id), f"id {token.token_id}"),
    }
    for condition, (step, value) in expected.items():
        out, _ = stepped("q\n", "-n", "8", "--temperature", "1.5", "--seed", "3", "--break", condition)
        assert f"paused at step {step}: {condition} (" in out, condition
        assert value in out


def test_a_text_pauses_where_it_is_complete(stepped):
    out, trace = stepped("=xyz\nc\nq\n", "--step", "--break", "text=yz", "-n", "6")
    assert pauses(out) == [2]
    assert [step.text for step in trace.path()][:3] == ["x", "y", "z"]


def test_a_loop_pauses_and_is_described(stepped):
    out, _ = stepped(f"={'ab' * 17}\nq\n", "--step", "--break", "loop", "-n", "60")
    assert "paused at step 33: loop (a block of 2 tokens, 17 times)" in out


@pytest.mark.parametrize("condition", ["entropy", "entropy<1", "heat>2", "rank>1.5", "margin<0", "nonfinite=1"])
def test_a_condition_that_cannot_be_is_one_sentence(cli, tiny, condition):
    done = cli("run", "Hi", "-m", tiny, "--break", condition)
    assert done.code == 2 and done.fault.startswith("--break ")


@pytest.mark.parametrize("more", [["--json"], ["--prompts", "x"]])
def test_breaks_are_for_one_prompt_in_a_terminal(cli, tiny, more):
    prompt = [] if "--prompts" in more else ["Hi"]
    assert cli("run", *prompt, "-m", tiny, "--break", "loop", *more).code == 2


def changed_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    make_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_non_finite_value_that_the_logits_do_not_show_pauses_the_run(cli, tmp_path, monkeypatch):
    def overflow(weights: dict[str, torch.Tensor]) -> None:
        """`Q` is nothing but its first unit, from which the last MLP makes more than float32 can hold."""
        weights["model.embed_tokens.weight"][ord("Q") - 33, 0] = 60_000
        last = "model.layers.1.mlp."
        for name in ("gate_proj", "up_proj"):
            weights[f"{last}{name}.weight"][0] = 0
            weights[f"{last}{name}.weight"][0, 0] = 1
        weights["model.layers.1.post_attention_layernorm.weight"][0] = 1
        weights[f"{last}down_proj.weight"][0] = 0
        weights[f"{last}down_proj.weight"][0, 0] = 1e38

    model = changed_model(tmp_path / "model", overflow)
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
    done = cli("run", "aQb", "--raw", "-m", model, "--ignore-eos", "-n", "4", "--break", "nonfinite")
    assert done.code == 0
    assert pauses(done.out) == [0]
    assert re.search(r"paused at step 0: nonfinite \(inf in layers\.1\.mlp_out at position 1\)", done.out)


def test_non_finite_logits_end_the_run_as_a_finding_that_names_the_place(cli, tmp_path, monkeypatch):
    def broken(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"][3] = 3e38  # finite, but no sum of them is

    model = changed_model(tmp_path / "model", broken)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done = cli("run", "Hi", "-m", model, "-n", "4", "--break", "nonfinite")
    assert done.code == 1
    assert "The logits of step 0 hold NaN or infinity" in done.fault and " in layers.1.mlp_out at " in done.fault
    assert "finished                  error" in done.out
