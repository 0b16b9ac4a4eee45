"""`tokens`, `model`, `pull`, help: tables and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from decodescope.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).resolve().parents[1] / "data" / "configs" / "qwen2.5-7b-instruct.config.json"


def checked(name: str, text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text()))
    return found


def test_spring_is_one_token(cli, starter_path):
    found = checked("tokens", cli("tokens", "春天", "-m", starter_path, "--json").out)
    assert found["ids"] == [105303]
    (token,) = found["tokens"]
    assert (token["text"], token["bytes_hex"], token["role"]) == ("春天", "e698a5e5a4a9", "text")


def test_the_table_shows_every_stage(cli, starter_path):
    out = cli("tokens", "e\u0301 龘<|im_end|>", "-m", starter_path).out
    assert "é" in out and "normalised" in out
    assert out.count("part of a character") == 3
    assert "control token typed inside content" in out
    assert "151645" in out


def test_the_seven_billion_model_costs_what_is_published(cli):
    found = checked("model", cli("model", "--config", CONFIG, "--json").out)
    assert found["parameters"]["total"] == 7_615_616_512
    assert found["parameters"]["non_embedding"] == 6_525_621_760
    assert found["weight_bytes"]["bfloat16"] == 15_231_233_024
    assert found["kv_bytes_per_token"]["bfloat16"] == 57_344
    table = cli("model", "--config", CONFIG).out
    for figure in ("7,615,616,512", "15,231,233,024", "57,344", "1/7 of"):
        assert figure in table


def test_the_parts_of_a_model_add_up(cli, tiny):
    parameters = checked("model", cli("model", "-m", tiny, "--json").out)["parameters"]
    parts = ("embedding", "attention", "mlp", "norms", "head")
    assert sum(parameters[part] for part in parts) == parameters["total"]


def test_stored_bytes_are_those_of_the_file(cli, small_path):
    stored = checked("model", cli("model", "-m", small_path, "--json").out)["stored_bytes"]
    assert set(stored) == {"F32", "Q4_1", "Q8_0"}
    header_bytes = small_path.stat().st_size - sum(stored.values())
    assert 0 < header_bytes < 3_000_000


def test_pull_tells_source_hash_and_size(cli, small_path):
    found = checked("pull", cli("pull", str(small_path), "--json").out)
    assert found["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert found["bytes"] == 98_362_432
    assert found["sha256"] in cli("pull", str(small_path)).out


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert main(["run", "Hi", "-m", tiny, "-n", "2", "--save", str(folder)]) == 0
    return str(folder)


@pytest.mark.parametrize(
    "command",
    [["--help"], ["run", "--help"], ["--version"], ["show", "RUN"], ["export", "RUN"], ["show", "RUN", "--json"]],
)
def test_help_show_and_export_start_without_torch(command, saved):
    command = [saved if word == "RUN" else word for word in command]
    code = (
        "import sys\nfrom decodescope.cli.main import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'pyarrow'} & sys.modules.keys()\n"
        "assert '--help' not in sys.argv or 'numpy' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_no_command_shows_help(program):
    assert "Commands:" in program().out and program().code == 0
