"""Session and LiveRun on a tiny whole model: what is recorded, batches, changing a run, what survives faults."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from decodescope import RunOptions, Session, read_trace
from decodescope.errors import FindingError, InputError
from decodescope.observe.recorder import RowRecorder
from tiny_model import IM_END, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session.open(str(folder))


def test_the_run_tells_what_it_is(session, folder):
    trace = session.run("Hi", max_new_tokens=3)
    run = trace.run
    assert (run.path, run.source, run.architecture, run.dtype) == (
        str(folder),
        "folder",
        "Qwen2ForCausalLM",
        "float32",
    )
    assert run.stop_ids == (IM_END, 258)
    assert run.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert run.prompt_text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    roles = {t.role for t in run.prompt_tokens}
    assert roles == {"template", "user"}


def test_the_cache_grows_by_one_token_a_step_and_equals_the_formula(session):
    trace = session.run("Hi", max_new_tokens=6, ignore_eos=True)
    prompt = len(trace.run.prompt_tokens)
    assert [s.kv.tokens for s in trace.steps] == list(range(prompt, prompt + 6))
    for step in trace.steps:
        assert step.kv.used_bytes == trace.run.kv_bytes_per_token * step.kv.tokens
        assert step.kv.allocated_bytes >= step.kv.used_bytes


def test_without_cache_the_tokens_are_the_same_and_nothing_is_cached(session):
    cached = session.run("Hi", max_new_tokens=6)
    plain = session.run("Hi", max_new_tokens=6, use_cache=False)
    assert plain.token_ids == cached.token_ids
    assert {s.kv.used_bytes for s in plain.steps} == {0}


def test_joined_deltas_are_the_text(session):
    for seed in range(4):
        trace = session.run("Hi", max_new_tokens=40, temperature=1.0, seed=seed, ignore_eos=True)
        whole = session.tokenizer.decode(trace.token_ids, skip_special=True)
        assert "".join(s.delta_text for s in trace.steps) == trace.end.text == whole


def test_settings_know_their_origin(session):
    trace = session.start([session.prompt("Hi")], RunOptions({"top_k": 5}, checkpoint_settings=True)).traces[0]
    origins = {s.name: (s.value, s.origin) for s in trace.run.settings}
    assert origins["temperature"] == (0.7, "checkpoint")
    assert origins["top_k"] == (5, "command line")
    assert origins["repetition_penalty"] == (1.05, "checkpoint")
    assert origins["min_p"] == (0.0, "default")
    assert isinstance(origins["seed"][0], int)  # drawn and told, so that the run can be repeated


def test_a_drawn_seed_repeats_the_run(session):
    first = session.run("Hi", temperature=1.0, max_new_tokens=12)
    seed = {s.name: s.value for s in first.run.settings}["seed"]
    assert session.run("Hi", temperature=1.0, max_new_tokens=12, seed=seed).token_ids == first.token_ids


def test_stop_strings_end_the_run_and_are_no_part_of_the_text(session):
    free = session.run("Hi", max_new_tokens=30, ignore_eos=True)
    stop = free.end.text[3:5]
    stopped = session.run("Hi", max_new_tokens=30, ignore_eos=True, stop=(stop,))
    assert stopped.end.finish_reason == "stop"
    assert stopped.end.stop_string == stop and stopped.end.stop_token_id is None
    assert stopped.end.text == free.end.text.partition(stop)[0]


def test_a_batch_row_is_the_run_alone_and_each_has_its_folder(session, tmp_path):
    texts = ["Hi", "你好", "a longer prompt than the others"]
    live = session.start([session.prompt(t) for t in texts], RunOptions(max_new_tokens=9, save=tmp_path / "runs"))
    rows = [row for row, _ in live.steps()]
    assert set(rows) == {0, 1, 2}
    for row, text in enumerate(texts):
        alone = session.run(text, max_new_tokens=9)
        assert live.traces[row].token_ids == alone.token_ids
        assert read_trace(tmp_path / "runs" / f"{row:04d}").token_ids == alone.token_ids


def test_a_saved_run_reads_back_as_it_was(session, tmp_path):
    options = dict(temperature=0.9, top_p=0.9, seed=1, max_new_tokens=8, save=tmp_path / "run")
    trace = session.run("春天", **options)
    assert read_trace(tmp_path / "run") == trace


def test_kept_logits_are_the_logits(session, tmp_path):
    from safetensors.torch import load_file

    trace = session.run("Hi", max_new_tokens=2, save=tmp_path / "run", keep_logits=True)
    files = sorted((tmp_path / "run" / "tensors").iterdir())
    assert len(files) == 2
    logits = load_file(files[0])["logits"]
    assert logits.shape == (260,)
    assert int(logits.argmax()) == trace.token_ids[0]


def test_replace_makes_a_sibling_and_back_returns(session):
    live = session.start([session.prompt("Hi")], RunOptions(max_new_tokens=4, ignore_eos=True))
    steps = live.steps()
    _, first = next(steps)
    other = first.candidates[1].token_id
    forced = live.replace(other)
    assert (forced.token_id, forced.forced, forced.parent, forced.rank) == (other, True, None, 2)
    _, second = next(steps)
    assert second.parent == forced.node
    assert live.back().node == forced.node
    again = live.replace(first.token_id)
    rest = [step for _, step in steps]
    trace = live.traces[0]
    assert trace.path()[0].node == again.node
    assert trace.token_ids == session.run("Hi", max_new_tokens=4, ignore_eos=True).token_ids
    assert trace.end.new_tokens == 1 + len(rest) == 4
    assert len(trace.steps) == 7  # nothing made was forgotten


def test_fork_is_a_straight_run_with_the_forced_token(session):
    live = session.start([session.prompt("Hi")], RunOptions(max_new_tokens=6, ignore_eos=True))
    forced = []
    for _, step in live.steps():
        if step.step == 2:
            live.replace(step.candidates[3].token_id)
            forced = [s.token_id for s in live.traces[0].path()]
    prompt = session.prompt("Hi")
    from decodescope.generate import Limits, generate
    from decodescope.sampling.params import SamplingParams
    from decodescope.sampling.sampler import Sampler

    straight = generate(session.model, [[*prompt.ids, *forced]], [Sampler(SamplingParams())], Limits(3))
    assert live.traces[0].token_ids[3:] == [s[0].choice.token_id for s in straight]


def test_the_context_bounds_the_new_tokens_and_a_note_says_so(session):
    prompt = session.prompt("x" * 490, chat=False)
    live = session.start([prompt], RunOptions(max_new_tokens=100, ignore_eos=True))
    assert sum(1 for _ in live.steps()) == 512 - 490
    assert live.traces[0].run.notes == ("note.context_limit",)


def test_a_prompt_that_fills_the_context_is_refused_before_any_work(session):
    with pytest.raises(InputError, match="512"):
        session.run("x" * 600)


def test_an_interrupted_run_keeps_its_steps(session, tmp_path):
    live = session.start(
        [session.prompt("Hi")], RunOptions(max_new_tokens=50, ignore_eos=True, save=tmp_path / "r")
    )
    for _, step in live.steps():
        if step.step == 4:
            live.finish("interrupted")
            break
    trace = read_trace(tmp_path / "r")
    assert trace.end.finish_reason == "interrupted"
    assert len(trace.steps) == trace.end.new_tokens == 5


def test_non_finite_logits_end_the_run_with_a_finding(folder, tmp_path):
    broken = Session.open(str(folder))
    broken.model.model.norm.weight[0] = torch.nan
    live = broken.start([broken.prompt("Hi")], RunOptions(save=tmp_path / "run"))
    with pytest.raises(FindingError, match="step 0"):
        list(live.steps())
    assert read_trace(tmp_path / "run").end.finish_reason == "error"


OUT_OF_MEMORY = """
import resource, sys
from decodescope import RunOptions, Session
from decodescope.errors import ResourceError
session = Session.open(sys.argv[1])
live = session.start([session.prompt("x" * 2295, chat=False)], RunOptions(max_new_tokens=50, ignore_eos=True, save=sys.argv[2]))
try:
    for _, step in live.steps():
        if step.step == 3:  # the cache has to grow at 2304 tokens
            held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + (2 << 20), held + (2 << 20)))
except ResourceError as fault:
    print(fault)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS; runs on Linux")
def test_out_of_memory_in_mid_run_is_one_sentence_and_the_trace_stays(tmp_path):
    # A grown buffer takes 50 MB at once: more than an allocator keeps in reserve.
    wide = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=512, max_position_embeddings=4096)
    model = make_tiny_model(tmp_path / "model", **wide)
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(model), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Out of memory" in done.stdout and "KV cache" in done.stdout and "bfloat16" in done.stdout
    trace = read_trace(tmp_path / "run")
    assert trace.end.finish_reason == "error"
    assert len(trace.steps) >= 4


@pytest.mark.parametrize("count", [1, 3, 60])
def test_as_many_candidates_are_recorded_as_asked(session, count):
    step = session.run("Hi", max_new_tokens=1, candidates=count).steps[0]
    assert [c.rank for c in step.candidates] == list(range(1, count + 1))


def test_recording_changes_no_token_and_no_logit(session, monkeypatch):
    trace = session.run("Hi", max_new_tokens=5, temperature=1.0, seed=5)
    monkeypatch.setattr(RowRecorder, "record", lambda self, decoded, *rest: kept.append(decoded))
    kept: list = []
    live = session.start([session.prompt("Hi")], RunOptions({"temperature": 1.0, "seed": 5}, max_new_tokens=5))
    list(live.steps())
    assert [d.choice.token_id for d in kept] == trace.token_ids


def test_torch_is_not_needed_to_name_the_package():
    code = "import sys, decodescope; print('torch' in sys.modules); decodescope.read_trace; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_generation_config_that_is_no_object_is_refused(folder, tmp_path):
    copy = make_tiny_model(tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(InputError, match=r"generation_config\.json"):
        Session.open(str(copy))


def started(session: Session, **options) -> tuple:
    live = session.start(
        [session.prompt("Hi")], RunOptions(**{"max_new_tokens": 6, "ignore_eos": True, **options})
    )
    return live, live.steps()


def test_a_token_picked_by_hand_can_complete_a_stop_string(session, tmp_path):
    live, steps = started(session, stop=("z",), save=tmp_path / "run")
    next(steps)
    live.replace(session.tokenizer.encode("z")[0])
    assert list(steps) == []
    end = read_trace(tmp_path / "run").end
    assert (end.finish_reason, end.stop_string, end.text) == ("stop", "z", "")


def test_going_back_measures_the_cache_of_the_step_it_stands_at(session):
    live, steps = started(session)
    _, first = next(steps)
    next(steps)
    next(steps)
    live.back()
    second = live.replace(first.candidates[2].token_id)
    live.back()
    again = live.replace(first.candidates[1].token_id)
    assert (again.step, again.kv, again.timing.forward_s) == (0, first.kv, first.timing.forward_s)
    assert (second.step, second.kv.tokens, second.position) == (1, first.position + 1, first.position + 1)


def test_what_was_taken_back_is_no_part_of_the_run_that_ends(session, tmp_path):
    live, steps = started(session, save=tmp_path / "run")
    for _ in range(3):
        next(steps)
    kept = live.back()
    live.finish("interrupted")
    trace = read_trace(tmp_path / "run")
    assert trace.path()[-1].node == kept.node
    assert trace.end.new_tokens == len(trace.path()) == 2
    assert trace.end.text == "".join(step.delta_text for step in trace.path())


def test_a_reader_that_stops_reading_leaves_an_ended_run(session, tmp_path):
    live, steps = started(session, save=tmp_path / "run")
    next(steps)
    steps.close()
    assert read_trace(tmp_path / "run").end.finish_reason == "interrupted"
    with pytest.raises(ValueError, match="no newest token"):
        live.replace(0)


@pytest.mark.parametrize("token_id", [-1, 260])
def test_an_id_that_the_model_lacks_changes_nothing(session, token_id):
    live, steps = started(session)
    _, first = next(steps)
    with pytest.raises(InputError, match="260 rows"):
        live.replace(token_id)
    assert [step.node for _, step in steps] == [1, 2, 3, 4, 5]
    assert live.traces[0].path()[0].node == first.node


def test_options_and_single_changes_join(session):
    options = RunOptions({"top_k": 5}, max_new_tokens=2)
    trace = session.run("Hi", options=options, temperature=0.5)
    settings = {s.name: s.value for s in trace.run.settings}
    assert (settings["top_k"], settings["temperature"], trace.end.new_tokens) == (5, 0.5, 2)


def test_a_batch_is_not_saved_into_a_folder_in_use(session, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    prompts = [session.prompt("a"), session.prompt("b")]
    with pytest.raises(InputError, match="not empty"):
        session.start(prompts, RunOptions(save=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_session_that_is_let_go_frees_its_model_without_the_collector(folder):
    session = Session.open(str(folder))
    trace = session.run("Hi", max_new_tokens=3)
    branch, model = trace.fork(1, "x"), weakref.ref(session.model)
    gc.disable()
    try:
        del session, trace, branch
        assert model() is None
    finally:
        gc.enable()
