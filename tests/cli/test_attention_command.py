"""`attention`: heat maps, figures, JSON, pictures, both languages, and what is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from rich.cells import cell_len

from decodescope.cli import console
from tiny_model import make_tiny_model

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "attention.json"
TEXT = "so much depends"
LENGTH = len(TEXT)  # a byte is a token


def checked(text: str) -> dict:
    found = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return found


def test_json_holds_the_last_row_of_every_head_and_fits_the_schema(cli, tiny):
    found = checked(cli("attention", TEXT, "-m", tiny, "--raw", "--json").out)
    assert found["kind"] == "recomputed" and found["reconstruction_error"] < 1e-5
    assert found["notes"] == []  # no word on times, which this command does not tell
    assert [(h["layer"], h["head"], h["kv_head"]) for h in found["heads"]] == [
        (layer, head, head // 2) for layer in range(2) for head in range(4)
    ]
    for head in found["heads"]:
        assert head["step"] == 0 and head["positions"] == [LENGTH - 1]
        assert [len(row) for row in head["rows"]] == [LENGTH]
        assert sum(head["rows"][0]) == pytest.approx(1, abs=1e-5)
        assert head["sink_share"] == head["rows"][0][0]
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert "".join(token["text"] for token in found["tokens"]) == TEXT


def test_json_holds_the_rows_asked_for_and_those_of_the_steps(cli, tiny):
    chosen = ("--layer", "1", "--head", "1-2", "--position", "0-1", "--position", "4", "--steps", "3")
    found = checked(cli("attention", TEXT, "-m", tiny, "--raw", *chosen, "--json").out)
    rows = {(h["step"], h["head"]): [len(row) for row in h["rows"]] for h in found["heads"]}
    assert {h["layer"] for h in found["heads"]} == {1}
    first = {(0, head): [1, 2, 5] for head in (1, 2)}
    later = {(step, head): [LENGTH + step] for step in (1, 2) for head in (1, 2)}
    assert rows == first | later
    assert len(found["tokens"]) == LENGTH + 3


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (
            "en",
            ("Attention in", "recomputed", "differ from the layers", "layer 0", "duplicates", "nats"),
        ),
        ("zh", ("的注意力", "重算", "最多相差", "第 0 层", "重复", "nat")),
    ],
)
def test_strips_and_figures_are_drawn_in_both_languages(cli, tiny, language, words):
    for more in ((), ("--layer", "0")):  # a strip for each layer, then for each head
        out = cli("attention", TEXT, "-m", tiny, "--raw", "--lang", language, *more).out
        for word in words:
            assert word in out
    heads = [line for line in out.splitlines() if line.startswith(("KV head ", "KV 头 ")) and "·" in line]
    assert len(heads) == 4  # of the one layer


def test_a_map_has_its_tokens_along_both_sides_and_nothing_above_the_diagonal(cli, tiny):
    out = cli("attention", "abcde", "-m", tiny, "--raw", "--layer", "0", "--head", "1", "--position", "all").out
    lines = out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.split() == ["a", "b", "c", "d", "e"])
    start = lines[top].index("a")
    for row, letter in enumerate("abcde"):
        line = lines[top + 2 + row]
        assert line[:start].split() == [str(row), letter]
        cells = line[start:].rstrip()
        assert len(cells) == 2 * (row + 1) and not set(cells) - set("·░▒▓█")
    assert lines[top + 2][start:].rstrip() == "██"


def test_chinese_tokens_keep_the_cells_in_line(cli, starter_path):
    out = cli(
        "attention",
        "春天来了，花都开了",
        "-m",
        starter_path,
        "--raw",
        "--layer",
        "0",
        "--head",
        "0",
        "--position",
        "all",
    ).out
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["0", "春天"])
    starts = set()
    for row, line in enumerate(lines[first : first + 6]):
        cells = line.rstrip()[-2 * (row + 1) :]
        assert not set(cells) - set("·░▒▓█")
        starts.add(cell_len(line.rstrip()) - len(cells))
    assert len(starts) == 1
    # The first line names the model's file, wherever that lies.
    assert all(cell_len(line) <= console.PLAIN_WIDTH for line in lines[1:])


def test_a_long_prompt_is_pooled_into_the_width_and_says_so(cli, tiny):
    arguments = ("--layer", "0", "--head", "0", "--position", "all")
    out = cli("attention", "x" * 400, "-m", tiny, "--raw", *arguments).out
    assert "largest weight of 8 × 4 " in out
    assert all(cell_len(line) <= console.PLAIN_WIDTH for line in out.splitlines())


PICTURES = {
    "one head": (("--layer", "0", "--head", "2"), "layer 0 head 2"),
    "one layer": (("--layer", "1"), "layer 1"),
    "all layers": ((), "all heads by layer"),
}


@pytest.mark.parametrize(("chosen", "title"), PICTURES.values(), ids=PICTURES)
def test_pictures_show_the_whole_triangle_and_how_well_it_was_recomputed(cli, tiny, tmp_path, chosen, title):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    from matplotlib.image import imread

    arguments = ("attention", TEXT, "-m", tiny, "--raw", *chosen, "--image")
    done = cli(*arguments, tmp_path / "a.svg", "--json")
    rows = [len(row) for row in checked(done.out)["heads"][0]["rows"]]
    assert rows == list(range(1, LENGTH + 1)) and "a.svg" in done.err
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert title in words and "differ from the layers' own outputs by" in words
    assert cli(*arguments, tmp_path / "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    picture = imread(tmp_path / "a.png")
    assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[2]).round(2).tolist()}) > 20


def test_a_picture_of_many_tokens_says_how_it_is_pooled_in_chinese_too(cli, tiny, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it; ends when the pictures extra is installed")
    arguments = ("--layer", "0", "--head", "0", "--image", tmp_path / "a.svg", "--lang", "zh")
    assert cli("attention", "x" * 300, "-m", tiny, "--raw", *arguments).code == 0
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "每格是 2 × 2" in words and "第 0 层 头 0" in words and "查询" in words


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--layer", "2"), "layer 2"),
        (("--layer", "x"), "layer x"),
        (("--head", "4"), "query head"),
        (("--head", "9" * 5000), "query head"),
        (("--head", "2-1"), "query head"),
        (("--position", "2"), "position"),
        (("--position", "somewhere"), "position"),
        (("--steps", "-1"), "--steps"),
        (("--image", "a.gif"), "a.gif"),
        (("--image", "missing/a.png"), "missing/a.png"),
        (("--engine", "vllm"), "native"),
        (("--dtype", "int3"), "float32"),
        (("--system", "x"), "--system"),
    ],
)
def test_bad_input_is_one_sentence(cli, tiny, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    done = cli("attention", "Hi", "-m", tiny, "--raw", *arguments)
    assert word in done.fault and done.code == 2 and done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("prompt", "word"), [("", "empty"), ("x" * 600, "600 tokens")])
def test_a_prompt_that_cannot_be_is_one_sentence(cli, tiny, prompt, word):
    done = cli("attention", prompt, "-m", tiny, "--raw")
    assert word in done.fault and done.code == 2 and done.out == ""


def test_more_weights_than_a_document_holds_are_refused_with_a_way_out(cli, tmp_path):
    model = make_tiny_model(tmp_path / "long", max_position_embeddings=2000)
    done = cli("attention", "x" * 1500, "-m", model, "--raw", "--position", "all", "--json")
    assert "--layer" in done.fault and done.code == 2 and done.out == ""


def test_tokens_cannot_command_the_terminal(cli, tiny):
    for more in ((), ("--layer", "0", "--head", "0", "--position", "all")):
        out = cli("attention", "\x1b[31m\u202e", "-m", tiny, "--raw", "--steps", "3", *more).out
        assert not {c for c in out if (ord(c) < 32 and c != "\n") or c == "\u202e"}
