"""The rotary positions drawn: every figure of the report, and no sentence that the figures do not bear."""

import json
from dataclasses import replace

import pytest

from decodescope import Session
from decodescope.cli.rope_view import draw_rope
from decodescope.experiments.rope import RopePlan, study_rope
from decodescope.experiments.rope_records import RopeReport, RowsApart
from decodescope.locale import set_language

WORDS = {
    "en": (
        "rotary positions: theta 10,000",
        "only the distance counts",
        "does not exist",
        "before layer 2",
        "from layer 1 on",
    ),
    "zh": ("旋转位置编码：theta 10,000", "只有距离起作用", "语序不存在", "第 2 层之前看不出语序", "从第 1 层起"),
}


@pytest.fixture(scope="module")
def report(tiny) -> RopeReport:
    session = Session.open(tiny)
    return study_rope(session, session.prompt("hello", chat=False), RopePlan(position=12))


@pytest.fixture
def drawn(capsys):
    def draw(report: RopeReport, language: str = "en") -> str:
        set_language(language)
        capsys.readouterr()
        draw_rope(report)
        return capsys.readouterr().out

    return draw


def one_line(text: str) -> str:
    """Sentences are broken at the width of the terminal."""
    return " ".join(text.split())


@pytest.mark.parametrize("language", WORDS)
def test_everything_is_drawn_in_both_languages(drawn, report, language):
    out = drawn(report, language)
    for word in WORDS[language]:
        assert word.replace(" ", "") in "".join(out.split()).replace(" ", "")
    lines = out.splitlines()
    for pair in report.pairs:
        assert any(f"{pair.first} · {pair.second} " in line and f"{pair.cos:.4f}" in line for line in lines)
    for row in report.law.rows:
        assert any(f"{row.products[0]:.4f}" in line for line in lines)
    for way in report.word_order.ways:
        for rows in (way.last, way.others):
            assert any(f"{rows.by_layer[0]:.1e}  {rows.by_layer[1]:.1e}" in line for line in lines)
    for order in report.word_order.orders:
        assert " ".join(map(str, order.token_ids)) in one_line(out)


def test_what_was_not_measured_is_not_claimed(drawn, report):
    law = replace(report.law, holds=False, spread_float64=0.5)
    apart, same = RowsApart((0.5, 0.5), (1e-6, 1e-6), 1), RowsApart((0.0, 0.0), (1e-6, 1e-6), None)
    ways = tuple(replace(way, last=same, others=apart) for way in report.word_order.ways)
    out = one_line(drawn(replace(report, law=law, word_order=replace(report.word_order, ways=ways))))
    assert "the distance alone does not decide it here. ✗" in out and "only the distance counts" not in out
    assert "does not exist" not in out and "before layer" not in out
    assert out.count("apart from layer - on, the tokens before it from layer 1 on") == 4


def test_what_the_scaling_changed_and_a_far_position_are_told(drawn, report):
    slowed = replace(report.pairs[0], slowed=8.0)
    changed = replace(
        report, pairs=(slowed, *report.pairs[1:]), kept=3, slowed_most=8.0, kind="llama3", settings={"factor": 8.0},
        attention_factor=1.25, divisors=True, position=600, word_order=replace(report.word_order, by_character=True),
    )  # fmt: skip
    out = one_line(drawn(changed))
    for words in (
        "scaling llama3 (factor 8)", "3 of 4; the others turn up to 8 times slower", "÷ 8", "multiplied by 1.25",
        "rope_freqs", "beyond the context of 512", "character by character",
    ):  # fmt: skip
        assert words in out
    plain = one_line(drawn(report))
    assert "all 4 pairs" in plain and "position 12 of a context of 512" in plain
    for words in ("÷", "multiplied by", "rope_freqs", "beyond the context", "character by character"):
        assert words not in plain


def test_a_hostile_token_does_not_command_the_terminal(drawn, report):
    out = drawn(replace(report, law=replace(report.law, text="\x1b[2J\u202e")))
    assert "\x1b" not in out and "\u202e" not in out and "␛" in out


def test_forward_shows_them_at_the_position_asked_for(cli, tiny):
    found = json.loads(cli("forward", "Hello", "-m", tiny, "--raw", "--rope", "--json").out)["rope"]
    assert found["position"] == 4 and len(found["pairs"]) == 4 and found["law"]["holds"]
    assert [way["last"]["from_layer"] for way in found["word_order"]["ways"]] == [None, 2, 1, 1]
    drawn = cli("forward", "Hello", "-m", tiny, "--raw", "--rope-position", "9").out
    assert "angles at position 9 of a context of 512" in drawn
    assert json.loads(cli("forward", "Hello", "-m", tiny, "--raw", "--json").out)["rope"] is None


def test_a_position_that_is_none_is_refused(cli, tiny):
    outcome = cli("forward", "Hello", "-m", tiny, "--rope-position", "-1")
    assert outcome.code == 2 and "not -1" in outcome.fault
