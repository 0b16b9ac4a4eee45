"""Bad input: one clear sentence on standard error, exit code 2, never a traceback, nothing half done."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodescope import read_trace

RUN = ("run", "Hi", "-n", "1")


@pytest.fixture
def broken(tiny, tmp_path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "broken"))


def truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(outcome, *words: str) -> None:
    fault = outcome.fault
    assert outcome.code == 2, outcome
    for word in words:
        assert word in fault, fault


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--temperature", "-1"), "Temperature must be"),
        (("--temperature", "nan"), "temperature"),
        (("--top-p", "0"), "top-p"),
        (("--top-p", "1.5"), "top-p"),
        (("--top-k", "-1"), "top-k"),
        (("--min-p", "2"), "min-p"),
        (("--repetition-penalty", "0"), "Repetition"),
        (("--no-repeat-ngram-size", "-2"), "ngram"),
        (("--seed", "-1"), "seed"),
        (("--max-new-tokens", "0"), "max-new-tokens"),
        (("--candidates", "0"), "candidates"),
        (("--dtype", "int3"), "float32"),
        (("--device", "abacus"), "abacus"),
        (("--device", "cuda:7"), "cuda:7"),
        (("--engine", "vllm"), "native"),
        (("--threads", "0"), "threads"),
        (("--threads", "100000"), "1024"),
        (("--top-k", "99999999999999999999999"), "2147483647"),
        (("--keep", "everything", "--save", "x"), "logits"),
        (("--keep", "logits"), "--save"),
        (("--stop", ""), "stop"),
        (("--no-such-option",), "--no-such-option"),
        (("--temperature", "warm"), "--temperature"),
        (("--lang", "fr"), "en, zh"),
        (("--step", "--json"), "--step"),
        (("--raw", "--system", "x"), "--system"),
    ],
)
def test_an_impossible_setting_is_named(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    refused(cli(*RUN, "-m", tiny, *arguments), word)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "word"),
    [("/no/such/folder", "/no/such/folder"), ("./missing.gguf", "missing.gguf"), ("a b c", "a b c"), ("", "name")],
)
def test_a_model_that_is_not_there_is_named(cli, model, word):
    refused(cli(*RUN, "-m", model), word)


def test_an_empty_folder_is_no_model(cli, tmp_path):
    refused(cli(*RUN, "-m", tmp_path), str(tmp_path), "config.json")


def test_a_config_without_weights_is_no_model(cli, broken):
    (broken / "model.safetensors").unlink()
    refused(cli(*RUN, "-m", broken), "safetensors")


@pytest.mark.parametrize("share", [0, 0.0001, 0.5, 0.999])
def test_cut_off_safetensors_are_refused(cli, broken, share):
    truncate(broken / "model.safetensors", share)
    refused(cli(*RUN, "-m", broken), "model.safetensors")


@pytest.mark.parametrize("share", [0, 0.0001, 0.3, 0.9])
def test_a_cut_off_gguf_is_refused(cli, small_path, tmp_path, share):
    copy = tmp_path / "cut.gguf"
    copy.write_bytes(small_path.read_bytes()[: int(small_path.stat().st_size * share)])
    refused(cli(*RUN, "-m", copy), "cut.gguf")


def test_a_wrong_magic_is_refused(cli, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + b"\0" * 100)
    refused(cli(*RUN, "-m", tmp_path / "x.gguf"), "GGUF")


def test_an_old_gguf_version_is_refused(cli, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    refused(cli(*RUN, "-m", tmp_path / "x.gguf"), "version 1")


def test_an_unknown_architecture_is_refused_by_name(cli, broken):
    edit(broken / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    refused(cli(*RUN, "-m", broken), "MambaForCausalLM", "Qwen2ForCausalLM")


def test_a_config_key_that_changes_the_maths_is_refused_by_name(cli, broken):
    edit(broken / "config.json", attn_logit_softcapping=30.0)
    refused(cli(*RUN, "-m", broken), "attn_logit_softcapping", "30.0")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused_by_name(cli, broken, bad):
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    save_file(weights, broken / "model.safetensors")
    refused(cli(*RUN, "-m", broken), "model.layers.1.mlp.up_proj.weight", "1 values")


def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(cli, broken):
    good = load_file(broken / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    for changed, word in (
        ({k: v for k, v in good.items() if k != name}, "lacks 1"),
        ({**good, "model.layers.0.extra.weight": torch.zeros(2)}, "model.layers.0.extra.weight"),
        ({**good, name: torch.zeros(3)}, "[3]"),
    ):
        save_file(changed, broken / "model.safetensors")
        refused(cli(*RUN, "-m", broken), word)


def test_a_broken_tokenizer_is_refused(cli, broken):
    truncate(broken / "tokenizer.json", 0.5)
    refused(cli(*RUN, "-m", broken), "tokenizer.json")


def test_a_prompt_that_is_no_utf8_is_refused(program, tiny):
    refused(program("run", b"\xff\xfe", "-m", tiny), "UTF-8")
    refused(program("run", "-", "-m", tiny, stdin=b"\xff\xfe"), "UTF-8")


@pytest.mark.parametrize("mode", ["--chat", "--raw"])
def test_an_empty_prompt_is_refused(cli, tiny, mode):
    refused(cli("run", "", "-m", tiny, mode))


def test_raw_conversations_are_refused(cli, tiny, tmp_path):
    (tmp_path / "m.json").write_text('[{"role": "user", "content": "a"}]')
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    refused(cli("run", "--messages", tmp_path / "m.json", "-m", tiny, "--raw"), "--raw")
    refused(cli("tokens", "--messages", tmp_path / "m.json", "-m", tiny, "--raw"), "--raw")
    refused(cli("run", "--prompts", tmp_path / "p.jsonl", "-m", tiny, "--raw"), "--raw")


def test_an_export_never_overwrites_its_run(cli, tiny, tmp_path):
    cli(*RUN, "-m", tiny, "--save", tmp_path / "run")
    refused(cli("export", tmp_path / "run", "-o", tmp_path / "run" / "trace.db"), "run folder")
    assert len(read_trace(tmp_path / "run").steps) == 1


def test_no_prompt_or_two_are_refused(cli, tiny, tmp_path):
    refused(cli("run", "-m", tiny), "exactly one")
    refused(cli("run", "Hi", "--messages", tmp_path / "m.json", "-m", tiny), "exactly one")


def test_a_prompt_longer_than_the_context_is_refused(cli, tiny):
    refused(cli("run", "x" * 600, "-m", tiny), "512")


@pytest.mark.parametrize("content", ["", "{", "[]", '[{"role": "user"}]', '"text"', "\udcff"])
def test_a_broken_messages_file_is_refused(cli, tiny, tmp_path, content):
    (tmp_path / "m.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(cli("run", "--messages", tmp_path / "m.json", "-m", tiny), "m.json")


@pytest.mark.parametrize("content", ["", '{"prompt": 3}\n', '{"prompt": "a"}\nnot json\n'])
def test_a_broken_prompts_file_is_refused(cli, tiny, tmp_path, content):
    (tmp_path / "p.jsonl").write_text(content)
    refused(cli("run", "--prompts", tmp_path / "p.jsonl", "-m", tiny), "p.jsonl")


def test_a_full_or_foreign_folder_is_never_written_to(cli, tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    refused(cli(*RUN, "-m", tiny, "--save", tmp_path), "not empty")
    refused(cli(*RUN, "-m", tiny, "--save", tmp_path / "mine.txt"), "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc").exists(),
    reason="needs a place that cannot be written; runs with /proc, or as any user but root",
)
def test_a_folder_that_cannot_be_written_is_refused(cli, tiny):
    refused(cli(*RUN, "-m", tiny, "--save", "/proc/decodescope/run"), "/proc/decodescope/run")


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from decodescope.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE; runs wherever there is one")
def test_a_disk_that_fills_up_costs_no_recorded_step(tiny, tmp_path):
    arguments = ["run", "Hi", "-m", tiny, "-n", "400", "--ignore-eos", "--save", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("decodescope: error: ") and len(done.stderr.splitlines()) == 1
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line["token_id"] for line in printed if line["type"] == "step"]
    trace = read_trace(tmp_path / "run")
    assert trace.token_ids == steps and len(steps) > 3
    assert printed[-1]["finish_reason"] == "error"


@pytest.mark.parametrize("command", ["show", "export"])
def test_what_is_no_run_folder_is_refused(cli, tmp_path, command):
    refused(cli(command, tmp_path / "none"), "none")
    refused(cli(command, tmp_path), "no saved run")
    (tmp_path / "trace.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    refused(cli(command, tmp_path), str(tmp_path))


def test_an_unknown_export_format_is_refused(cli, tmp_path):
    refused(cli("export", tmp_path, "--to", "docx"), "jsonl")


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"architectures": ["Qwen2ForCausalLM"]}', '{"vocab_size": 1e999}']
)
def test_a_config_that_describes_no_model_is_refused(cli, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    refused(cli("model", "--config", tmp_path / "config.json"))


def test_tokens_needs_exactly_one_source(cli, tiny):
    refused(cli("tokens", "-m", tiny), "TEXT")
    refused(cli("tokens", "x", "--system", "y", "-m", tiny), "--chat")


def test_faults_are_told_in_chinese_too(program):
    outcome = program("run", "Hi", "-m", "/no/such/folder", "--lang", "zh")
    assert outcome.code == 2
    assert any("\u4e00" <= c <= "\u9fff" for c in outcome.fault)
