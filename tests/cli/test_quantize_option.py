"""--quantize: on every command that loads a model, the same three names, and one sentence for any other."""

import inspect
import json

import pytest

from decodescope.cli.app import app
from tiny_model import make_tiny_model

COMMANDS = {command.callback.__name__: command.callback for command in app.registered_commands}
LOADING = sorted(name for name, callback in COMMANDS.items() if "dtype" in inspect.signature(callback).parameters)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=256))


def test_the_commands_that_load_a_model_are_known():
    assert {"run", "forward", "lens", "attention", "kv", "sample"} <= set(LOADING)


@pytest.mark.parametrize("name", LOADING)
def test_whatever_takes_a_dtype_takes_quantize_too(name):
    parameter = inspect.signature(COMMANDS[name]).parameters["quantize"]
    assert parameter.default == (None if name == "fork" else "none")  # a fork: as the run was


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_run_in_fewer_bits_runs(cli, wide, kind):
    exact = cli("run", "hello", "-m", wide, "--raw", "-n", "3", "--json")
    found = cli("run", "hello", "-m", wide, "--raw", "-n", "3", "--json", "--quantize", kind)
    assert exact.code == found.code == 0, found.err
    steps = [[json.loads(line) for line in each.out.splitlines()][1] for each in (exact, found)]
    assert steps[0]["candidates"][0]["logit"] != steps[1]["candidates"][0]["logit"]


@pytest.mark.parametrize("name", ["int2", "", "INT8", "gptq", "[red]"])
@pytest.mark.parametrize(("language", "word"), [("en", "not offered"), ("zh", "int8")])
def test_a_name_that_is_not_offered_is_one_sentence_with_those_that_are(cli, tiny, name, language, word):
    found = cli("run", "hello", "-m", tiny, "--quantize", name, "--lang", language)
    assert found.code == 2
    assert all(known in found.fault for known in ("none", "int8", "int4", "nf4", word, name))
