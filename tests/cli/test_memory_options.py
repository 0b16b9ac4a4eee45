"""--random-weights, --layers-on-disk, --max-memory: the same on every command that opens a model."""

import inspect
import json

import pytest

from decodescope.cli.app import app

COMMANDS = {command.callback.__name__: command.callback for command in app.registered_commands}
OPENING = ("run", "forward", "lens", "attention", "kv", "sample")
KEYS = dict(
    architectures=["LlamaForCausalLM"], vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    return tmp_path


@pytest.mark.parametrize("name", OPENING)
def test_every_command_that_opens_a_model_has_them(name):
    found = inspect.signature(COMMANDS[name]).parameters
    assert {"random_weights", "layers_on_disk", "max_memory"} <= found.keys()


@pytest.mark.parametrize("command", ["run", "forward", "kv"])
def test_a_random_model_needs_a_configuration_only(cli, tiny, config, command):
    found = cli(command, "hello", "-m", tiny, "--raw", "-n", "2", "--random-weights", config)
    assert found.code == 0, found.err
    assert "random numbers" in found.out
    assert str(config / "config.json") in found.out


def test_layers_on_disk_give_the_same_lines(cli, tiny):
    lines = []
    for how in ((), ("--layers-on-disk", "all"), ("--layers-on-disk", "1")):
        found = cli("run", "hello", "-m", tiny, "--raw", "-n", "3", "--json", *how)
        assert found.code == 0, found.err
        lines.append([json.loads(line)["candidates"] for line in found.out.splitlines() if '"step"' in line[:20]])
    assert len(lines[0]) == 3 and lines[0] == lines[1] == lines[2]
    assert "1 of 2 layers on disk" in found.err


def test_a_limit_is_told_on_standard_error(cli, tiny):
    found = cli("run", "hello", "-m", tiny, "--raw", "-n", "1", "--json", "--max-memory", "16GiB")
    assert "--max-memory 16.00 GiB" in found.err
    assert all(json.loads(line) for line in found.out.splitlines())


@pytest.mark.parametrize("size", ["8 parsecs", "", "GiB", "-1"])
@pytest.mark.parametrize(("language", "word"), [("en", "number of bytes"), ("zh", "字节数")])
def test_a_limit_that_is_no_size_is_one_sentence(cli, tiny, size, language, word):
    found = cli("run", "hello", "-m", tiny, "--max-memory", size, "--lang", language)
    assert found.code == 2
    assert "--max-memory" in found.fault and word in found.fault
