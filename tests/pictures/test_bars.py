"""Bars: every label, every value, the limit where there is one."""

import pytest
from drawings import bars, words

from decodescope.pictures import Bar, Texts, draw_bars


def test_labels_values_titles_and_the_name_of_the_limit_are_drawn(tmp_path):
    bars(tmp_path / "a.svg", Texts("Decode", x="tokens/s", scale="limit"))
    found = words(tmp_path / "a.svg")
    for word in ("Decode", "batch of 1", "transformers", "10.0", "5.0"):
        assert word in found
    axes = [word for word in found if word.startswith("tokens/s")]
    assert len(axes) == 2 and "limit" in axes[0] and "limit" not in axes[1]  # the second has none to show


def test_every_limit_is_a_mark_of_its_own(tmp_path):
    def drawn(name: str, limits: list[float | None]) -> str:
        rows = [Bar("a", 1, 1, 1, limit) for limit in limits]
        draw_bars(tmp_path / name, [(rows, Texts("t", scale="limit"))])
        return (tmp_path / name).read_text(encoding="utf-8")

    assert drawn("none.svg", [None, None]).count("#d55e00") < drawn("both.svg", [2, 3]).count("#d55e00")


@pytest.mark.parametrize("charts", [[], [([], Texts("t"))]])
def test_a_picture_of_nothing_is_a_mistake(charts, tmp_path):
    with pytest.raises(ValueError, match="no bar"):
        draw_bars(tmp_path / "a.png", charts)
