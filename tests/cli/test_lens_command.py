"""`lens`: tables and bars in both languages, JSON, pictures, and what is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "lens.json"


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


def written(picture: Path) -> str:
    return "".join(ElementTree.parse(picture).getroot().itertext())


def test_json_fits_the_schema_and_holds_what_was_asked_for(cli, tiny):
    found = checked(cli("lens", "Hello", "-m", tiny, "--raw", "--top", "2", "--json").out)
    (position,) = found["positions"]
    assert (position["step"], position["position"], position["text"]) == (0, 4, "o")
    assert [layer["layer"] for layer in position["layers"]] == [0, 1]
    assert all(len(layer["top"]) == 2 for layer in position["layers"])
    assert position["layers"][-1]["choice_rank"] == 1 and position["layers"][0]["target_rank"] is None
    assert len(position["attribution"]["layers"][0]["head_logits"]) == 4
    assert found["last_layer_error"] < 1e-4 and found["target"] is None


def test_positions_steps_layers_and_target_together(cli, tiny):
    asked = ("--position", "0-1", "--position", "-2", "--steps", "2", "--layer", "1", "--target", "x")
    found = checked(cli("lens", "Hello", "-m", tiny, "--raw", *asked, "--json").out)
    places = [(p["position"], p["step"], p["chosen"]) for p in found["positions"]]
    assert places == [(0, 0, False), (1, 0, False), (3, 0, False), (4, 0, True), (5, 1, True)]
    for position in found["positions"]:
        assert [layer["layer"] for layer in position["layers"]] == [1]
        assert position["layers"][0]["target_rank"] >= 1
        assert position["attribution"]["text"] == "x"


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("Logit lens on", "would say", "entropy", "KL", "rank", "frozen", "KV head 1", "chosen by the run",
                "the prompt goes on with", "at most")),
        ("zh", ("Logit lens：", "会说", "熵", "KL", "名次", "固定不变", "KV 头 1", "步选出", "提示词接下来是", "最多相差")),
    ],
)  # fmt: skip
def test_layers_and_shares_are_drawn_in_both_languages(cli, tiny, language, words):
    done = cli("lens", "Hello", "-m", tiny, "--raw", "--position", "all", "--lang", language)
    assert done.code == 0
    for word in words:
        assert word in done.out
    assert done.out.count("◆") >= 5  # every choice is at the top in the end
    assert "█" * 10 in done.out  # the strongest share fills its side


def test_one_layer_and_one_token_are_enough_to_draw(cli, tiny):
    done = cli("lens", "Hi", "-m", tiny, "--raw", "--layer", "0", "--top", "1", "--target", "\x07")
    assert done.code == 0 and "␇" in done.out


def test_what_does_not_fit_is_said(cli, tiny):
    said = "of the 40 tokens fit here"
    assert said in cli("lens", "Hi", "-m", tiny, "--raw", "--top", "40").out
    assert "fit here" not in cli("lens", "Hi", "-m", tiny, "--raw", "--top", "2").out


def test_the_chat_template_is_the_default(cli, tiny):
    found = checked(cli("lens", "Hi", "-m", tiny, "--json").out)
    assert found["prompt"][0]["text"] == "<|im_start|>"
    assert found["positions"][0]["position"] == len(found["prompt"]) - 1


def test_sixteen_bit_runs_are_read_in_float32_and_the_difference_told(cli, tiny):
    found = checked(cli("lens", "Hi", "-m", tiny, "--raw", "--dtype", "bfloat16", "--json").out)
    assert found["dtype"] == "bfloat16" and 1e-4 < found["last_layer_error"] < 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [((), ("熵", "KL", "-ln p", "nat")), (("--position", "all"), ("概率", "位置", "0 H", "1 i"))],
)
def test_one_position_is_drawn_as_curves_and_several_as_a_map(cli, tiny, tmp_path, asked, words):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    picture = tmp_path / "lens.svg"
    done = cli("lens", "Hi", "-m", tiny, "--raw", *asked, "--target", "x", "--image", picture, "--lang", "zh")
    assert done.code == 0 and "lens.svg" in done.err
    for word in words:
        assert word in written(picture)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--position", "5"), "0 to 4"),
        (("--position", "3-9"), "3-9"),
        (("--position", "first"), "first"),
        (("--position", ""), "0 to 4"),
        (("--layer", "2"), "2"),
        (("--layer", "x"), "x"),
        (("--steps", "-1"), "--steps"),
        (("--top", "0"), "--top"),
        (("--target", "xyz"), '"x" "y" "z"'),
        (("--target", ""), "--target"),
        (("--target", "id:260"), "0 to 259"),
        (("--target", "\udcff"), "Unicode"),
        (("--image", "lens.gif"), "lens.gif"),
        (("--engine", "vllm"), "native"),
        (("--dtype", "int3"), "float32"),
        (("--raw", "--system", "x"), "--system"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    done = cli("lens", "Hello", "-m", tiny, "--raw", *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("prompt", "word"), [("", "empty"), ("x" * 600, "600 tokens")])
def test_a_prompt_that_cannot_be_is_one_sentence(cli, tiny, prompt, word):
    done = cli("lens", prompt, "-m", tiny, "--raw")
    assert word in done.fault and done.code == 2 and done.out == ""


def test_tokens_cannot_command_the_terminal(cli, tiny):
    done = cli(
        "lens", "\x1b[31m\u202e", "-m", tiny, "--raw", "--position", "all", "--top", "8", "--target", "\x1b"
    )
    assert not {c for c in done.out if (ord(c) < 32 and c != "\n") or c == "\u202e"}
    assert "␛" in done.out
