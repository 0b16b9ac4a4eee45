"""Tokens stand in a picture as they are spelled, Chinese ones too, and what no font draws is named."""

from itertools import pairwise

import numpy as np
import pytest
from drawings import NONE, causal, curves, heat_map, words
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import font_manager
from matplotlib.font_manager import fontManager
from matplotlib.image import imread

from decodescope.pictures import Matrix, Texts, draw_heat_map
from decodescope.pictures.fonts import CHINESE, FIRST, families_for
from decodescope.pictures.labels import MOST_LABELS, cut, thinned, width

NO_FONT = "\U0010fffd"  # private use, at the end of Unicode
HOSTILE = ["$\\frac$", "$x$", "_hidden", "<b>&amp;", "{a}", "%d", "大语言模型", "\\$", "-->", "'\""]


def test_tokens_are_never_formulas_markup_or_hidden(tmp_path):
    path = tmp_path / "a.svg"
    heat_map(path, HOSTILE, Texts("$t$", "$i$", "$j$", "$s$"))
    drawn = words(path)
    assert [drawn.count(label) for label in HOSTILE] == [2] * len(HOSTILE)  # once along each side
    assert [drawn.count(title) for title in ("$t$", "$i$", "$j$", "$s$")] == [1] * 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=9)))
def test_every_label_that_fits_is_drawn_whole(tmp_path_factory, labels):
    path = tmp_path_factory.mktemp("labels") / "a.svg"
    heat_map(path, ["a", *labels])
    drawn = words(path)
    assert all(drawn.count(label) >= 2 * labels.count(label) for label in labels)


@pytest.mark.parametrize("label", ["_hidden", "$x$", "有缓存"])
def test_a_line_is_named_whatever_its_name(label, tmp_path):
    curves(tmp_path / "a.svg", label)
    assert label in words(tmp_path / "a.svg")


def test_chinese_is_drawn_character_by_character_from_a_font_that_has_it(tmp_path):
    families, missing = families_for(["the 大语言模型"])
    assert families[0] == FIRST and families[1] in CHINESE and missing == ()
    pictures = []
    for name, token in (("a", "大大"), ("b", "模模")):  # boxes for missing characters would all look alike
        assert heat_map(tmp_path / f"{name}.png", [token]) == ()
        pictures.append(imread(tmp_path / f"{name}.png"))
    assert pictures[0].shape == pictures[1].shape and (pictures[0] != pictures[1]).any()


def test_characters_that_no_font_draws_are_named_once_and_the_picture_still_comes(tmp_path):
    label = f"大{NO_FONT}a{NO_FONT}"
    assert heat_map(tmp_path / "a.png", [label, label]) == (NO_FONT,)
    assert (tmp_path / "a.png").stat().st_size
    assert heat_map(tmp_path / "a.svg", [label, label]) == ()
    assert label in words(tmp_path / "a.svg")


def test_spaces_joiners_and_variation_selectors_are_not_missed():
    assert families_for(["a b\u00a0\u200d\ufe0f"])[1] == ()


def test_an_svg_names_chinese_families_for_any_viewer(tmp_path):
    curves(tmp_path / "a.svg")
    drawing = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(f"'{family}'" in drawing for family in (FIRST, *CHINESE))
    assert "<text" in drawing


def test_fonts_are_found_that_matplotlib_has_not_listed_yet(monkeypatch, chinese_folder):
    monkeypatch.setattr(fontManager, "ttflist", [e for e in fontManager.ttflist if e.name == FIRST])
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(p) for p in chinese_folder.iterdir()])
    families, missing = families_for(["大"])
    assert families[0] == FIRST and families[1] in CHINESE and missing == ()


def test_a_font_whose_file_has_gone_is_passed_over(monkeypatch, chinese_folder):
    (font,) = [path for path in chinese_folder.iterdir() if path.stem != "broken"]
    monkeypatch.setattr(fontManager, "ttflist", [e for e in fontManager.ttflist if e.name == FIRST])
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    fontManager.addfont(font)
    font.unlink()
    assert families_for(["大"]) == ([FIRST], ("大",))


def test_cell_texts_are_drawn_where_they_fit_and_left_out_where_not(tmp_path):
    def drawn(rows: int) -> list[str]:
        matrix = Matrix(np.ones((rows, 2)) / 2, [""] * rows, ["", ""], [["大", "$m$"]] * rows)
        draw_heat_map(tmp_path / "a.svg", matrix, NONE)
        return words(tmp_path / "a.svg")

    assert (drawn(30).count("大"), drawn(30).count("$m$")) == (30, 30)
    assert "大" not in drawn(500)


def test_labels_are_thinned_before_they_overlap(tmp_path):
    draw_heat_map(tmp_path / "a.svg", Matrix(causal(500), ["行"] * 500, ["列"] * 500), NONE)
    drawn = words(tmp_path / "a.svg")
    assert 32 <= drawn.count("行") <= MOST_LABELS and 32 <= drawn.count("列") <= MOST_LABELS


@given(st.lists(st.text(max_size=3), max_size=300))
def test_thinned_labels_are_even_and_begin_with_the_first(labels):
    shown = list(thinned(labels))
    indices = [index for index, _ in shown]
    assert len(shown) <= MOST_LABELS and indices[:1] == [0][: len(labels)]
    assert len({after - before for before, after in pairwise(indices)}) <= 1
    assert all(label == cut(labels[index]) for index, label in shown)


@given(st.text(), st.integers(2, 30))
def test_a_cut_label_fits_and_begins_as_the_whole_one(text, widest):
    shown = cut(text, widest)
    assert width(shown) <= widest or text == shown
    assert text == shown if width(text) <= widest else text.startswith(shown.removesuffix("…"))
