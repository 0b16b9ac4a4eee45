"""`forward`: the walk on a terminal and as a document, choosing, keeping, comparing, and what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from decodescope.cli import console
from decodescope.probe import SITES
from tiny_model import make_tiny_model

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "forward.json"


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> str:
    """A model of nine layers whose eighth leaves float32 in one unit of `up`."""
    folder = make_tiny_model(tmp_path_factory.mktemp("overflow") / "tiny", num_hidden_layers=9)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.7.mlp.up_proj.weight"][5] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def spoilt(tiny, tmp_path_factory) -> str:
    """The tiny model with the two KV heads of its second layer exchanged."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("spoilt") / "tiny"))
    weights = load_file(folder / "model.safetensors")
    for name in ("weight", "bias"):
        key = f"model.layers.1.self_attn.k_proj.{name}"
        weights[key] = weights[key].roll(8, 0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_json_holds_every_site_in_order_and_fits_the_schema(cli, tiny):
    done = cli("forward", "Hello", "-m", tiny, "--raw", "--steps", "2", "--values", "--json")
    found = checked(done.out)
    assert done.code == 0 and found["ids"] == [39, 68, 75, 75, 78]
    assert len(found["sites"]) == len(found["values"]) == 2 * (2 * 18 + 3)
    first = [(site["layer"], site["site"]) for site in found["sites"] if site["step"] == 0]
    assert first[0] == (None, "embed") and first[-2:] == [(None, "final_norm"), (None, "logits")]
    names = [site for layer, site in first if layer == 1]
    assert names == [site.name for site in SITES if site.name in names]
    assert found["sites"][0]["shape"] == [1, 5, 32] and found["first_nonfinite"] is None
    assert {"NaN", "Infinity"}.isdisjoint(json.dumps(found["sites"]).split('"'))
    masked = next(each for each in found["values"] if each["site"] == "scores")["rows"][0]
    assert masked["index"] == [0, 0] and "-Infinity" in masked["head"] + masked["tail"]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("Forward pass of", "before the layers", "residual", "cosine", "recomputed", "the token chosen")),
        ("zh", ("的前向计算", "各层之前", "残差", "余弦", "重新计算", "选出的 token")),
    ],
)
def test_the_walk_is_drawn_layer_by_layer_in_both_languages(cli, tiny, language, words):
    out = cli("forward", "Hi", "-m", tiny, "--raw", "--lang", language).out
    for word in words:
        assert word in out
    lines = out.splitlines()
    headings = [line for line in lines if re.match(r"layers\.\d+  [\d.]+ ms · ", line)]
    assert [line.split()[0] for line in headings] == ["layers.0", "layers.1"]
    shown = [line.split()[0] for line in lines if "float32[" in line]
    layer = ["resid_pre", "attn_norm", "q", "k", "v", "q_rot", "k_rot", "scores≈", "pattern≈", "z", "attn_out",
             "resid_mid", "mlp_norm", "gate", "up", "act", "mlp_out", "resid_post"]  # fmt: skip
    assert shown == ["embed", *layer, *layer, "final_norm", "logits"]
    assert max(map(len, lines)) <= console.PLAIN_WIDTH


def test_sites_and_layers_are_chosen_and_tensors_shown(cli, tiny):
    done = cli(
        "forward", "Hi", "-m", tiny, "--raw", "--site", "q", "--site", "logits", "--layer", "-1", "--values"
    )
    shown = [line.split()[0] for line in done.out.splitlines() if "float32[" in line]
    assert shown == ["q", "logits"]
    assert "    [0, 0]" in done.out and "    [3, 1]" in done.out and "…" in done.out


def test_on_a_narrow_terminal_figures_are_left_out_and_never_the_broken_ones(cli, tiny, monkeypatch):
    monkeypatch.setattr(console.out(), "width", 80)
    out = cli("forward", "Hi", "-m", tiny, "--raw", "--site", "resid_post").out
    assert "signature" not in out and "NaN/Inf" in out and "L2" in out
    walked = out.splitlines()[out.splitlines().index("Step 0: positions 0 to 1") :]
    assert max(map(len, walked)) <= 80


def test_tensors_are_kept_within_the_budget_and_the_rest_is_listed(cli, tiny, tmp_path):
    keep = ("--keep", "layers.0.q", "--keep", "logits", "--keep-budget", "1KiB", "--save", tmp_path / "run")
    done = cli("forward", "Hello", "-m", tiny, "--raw", *keep)
    assert done.code == 0
    assert "640 B of 1.00 KiB" in done.out and "dropped: logits of step 0" in done.out
    found = checked(cli("forward", "Hi", "-m", tiny, "--raw", *keep[:-1], tmp_path / "two", "--json").out)
    assert [each["name"] for each in found["kept"]] == ["layers.0.q"]
    assert [each["site"] for each in found["dropped"]] == ["logits"]
    assert found["budget_bytes"] == 1024 and found["trace"] == str(tmp_path / "two")


def test_a_second_run_is_compared_and_a_fault_is_marked_where_it_is(cli, tiny, spoilt, tmp_path):
    arguments = ("forward", "Hello", "--raw", "--steps", "2")
    assert cli(*arguments, "-m", tiny, "--save", tmp_path / "good").code == 0
    same = cli(*arguments, "-m", tiny, "--against", tmp_path / "good", "--threads", "2")
    assert same.code == 0 and "Departs nowhere ✓" in same.out and "<--" not in same.out
    other = cli(*arguments, "-m", spoilt, "--against", tmp_path / "good")
    assert other.code == 1 and "layers.1.k" in other.fault and "model: " in other.out
    marked = [line for line in other.out.splitlines() if "<-- first departure" in line]
    assert len(marked) == 1 and marked[0].split()[0] == "k"
    before = other.out[: other.out.index(marked[0])]
    assert "layers.1  " in before and "Step 1" not in before
    found = cli(*arguments, "-m", spoilt, "--against", tmp_path / "good", "--json")
    document = checked(found.out)
    assert found.code == 1 and found.fault
    assert (document["departure"]["layer"], document["departure"]["site"]) == (1, "k")
    assert document["departure"]["figure"] == "signature" and document["against"]["ids_part_at"] is None


def test_other_ids_are_told_before_any_number(cli, tiny, tmp_path):
    cli("forward", "Hello", "-m", tiny, "--raw", "--save", tmp_path / "good")
    done = cli("forward", "Help", "-m", tiny, "--raw", "--against", tmp_path / "good", "--lang", "zh")
    assert done.code == 1 and "id 从位置 3 起不同" in done.out and "位置 3" in done.fault


@pytest.mark.parametrize(("language", "words"), [("en", "First non-finite value"), ("zh", "首个非有限值")])
def test_the_first_broken_number_is_told_in_full_and_is_the_exit_code(cli, overflowing, language, words):
    done = cli("forward", "Hello", "-m", overflowing, "--raw", "--lang", language)
    assert done.code == 1 and "layers.7.up" in done.fault
    (said,) = [line for line in done.out.splitlines() if words in line]
    assert "layers.7.up" in said and "inf" in said and "[5]" in said
    assert "mlp_norm" in done.out and "3.4028e38" in done.out
    document = checked(cli("forward", "Hello", "-m", overflowing, "--raw", "--json").out)
    broken = document["first_nonfinite"]
    assert (broken["layer"], broken["site"], broken["source"]) == (7, "up", "mlp_norm")
    assert len(document["sites"]) == 9 * 18 + 3
    assert "Infinity" in {site["max"] for site in document["sites"]} or "-Infinity" in {
        site["min"] for site in document["sites"]
    }


def test_a_broken_number_that_still_leaves_a_choice_is_a_finding_too(cli, overflowing):
    document = checked(cli("forward", "Hello", "-m", overflowing, "--raw", "--site", "layers.7.up", "--json").out)
    assert document["first_nonfinite"]["site"] == "up" and len(document["sites"]) == 1


def test_the_rotary_positions_are_shown_with_the_walk(cli, tiny):
    done = cli("forward", "Hi", "-m", tiny, "--raw", "--site", "logits", "--rope-position", "5")
    assert "rotary positions" in done.out and "at position 5" in done.out
    found = checked(cli("forward", "Hi", "-m", tiny, "--raw", "--site", "logits", "--rope", "--json").out)
    assert found["rope"]["position"] == 1 and len(found["rope"]["pairs"]) == 4


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--steps", "-1"), "--steps"),
        (("--site", "nowhere"), "nowhere"),
        (("--layer", "9"), "layer 9"),
        (("--layer", "1", "--site", "layers.0.q"), "loosen"),
        (("--keep", "q"), "--save"),
        (("--keep", "nowhere", "--save", "run"), "nowhere"),
        (("--keep-budget", "much"), "--keep-budget"),
        (("--keep-budget", "-5"), "--keep-budget"),
        (("--keep-budget", "9" * 400), "--keep-budget"),
        (("--against", "missing"), "missing"),
        (("--tolerance", "0.1"), "--against"),
        (("--save", "used"), "used"),
        (("--engine", "vllm"), "native"),
        (("--dtype", "int3"), "float32"),
        (("--rope-position", "-2"), "-2"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    done = cli("forward", "Hi", "-m", tiny, *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf"])
def test_a_tolerance_is_a_plain_number(cli, tiny, tmp_path, tolerance):
    cli("forward", "Hi", "-m", tiny, "--site", "embed", "--save", tmp_path / "good")
    done = cli("forward", "Hi", "-m", tiny, "--against", tmp_path / "good", "--tolerance", tolerance)
    assert "--tolerance" in done.fault and done.code == 2 and done.out == ""


def test_a_run_saved_without_sites_is_refused_before_the_model_loads(cli, tiny, tmp_path):
    cli("run", "Hi", "-m", tiny, "-n", "1", "--save", tmp_path / "plain")
    done = cli("forward", "Hi", "-m", "no-such-model", "--against", tmp_path / "plain")
    assert "without its inner values" in done.fault and done.code == 2


def test_a_saved_run_that_has_none_of_the_sites_is_no_clean_bill(cli, tiny, tmp_path):
    arguments = ("forward", "Hi", "-m", tiny, "--layer", "1")
    cli(*arguments, "--site", "q", "--save", tmp_path / "q")
    done = cli(*arguments, "--site", "k", "--against", tmp_path / "q")
    assert done.code == 2 and "none of the sites" in done.err
    assert cli(*arguments, "--against", tmp_path / "q").code == 0


def test_tokens_cannot_command_the_terminal(cli, tiny):
    out = cli("forward", "\x1b[31m\u202e", "-m", tiny, "--raw", "--site", "embed", "--steps", "20").out
    assert not {c for c in out if (ord(c) < 32 and c != "\n") or c == "\u202e"}


def test_an_interrupted_walk_leaves_what_it_had_seen(tiny, tmp_path):
    arguments = [
        "forward",
        "Hi",
        "-m",
        tiny,
        "--steps",
        "400",
        "--site",
        "resid_post",
        "--save",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "decodescope", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job hands down an ignored SIGINT, which Python would respect.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    with process:
        while not (tmp_path / "run" / "trace.db-wal").exists() or _rows(tmp_path / "run") < 3:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert "Step 0: positions" in out and "Stopped early" in out
    assert err.startswith("decodescope: error: Interrupted") and len(err.splitlines()) == 1


def _rows(folder: Path) -> int:
    from decodescope.trace.saved import read_trace

    return len(read_trace(folder).steps)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("64MiB", 64 * 2**20), ("1 gib", 2**30), ("0", 0), ("5B", 5), ("2TiB", 2 * 2**40),
     ("1MB", None), ("", None), ("-1", None), ("1.5GiB", None), ("MiB", None), ("٣", None)],
)  # fmt: skip
def test_sizes_are_read_as_they_are_written(text, size):
    from decodescope.cli.units import parsed_bytes

    assert parsed_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.5e-5, "1.5e-5"),
        (-0.001234, "-0.00123"),
        (12345.0, "1.23e4"),
        (float("nan"), "nan"),
        (1e300, "1e300"),
    ],
)
def test_figures_are_short(value, shown):
    from decodescope.cli.units import figure

    assert figure(value) == shown
