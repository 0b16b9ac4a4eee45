"""Values keep their colours and places; panels keep their rows, groups and captions."""

import numpy as np
import pytest
from drawings import NONE, atlas, causal, words
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from decodescope.pictures import (
    Curve,
    Matrix,
    Panel,
    Row,
    Texts,
    draw_atlas,
    draw_curves,
    draw_heat_map,
    rows_by_group,
)
from decodescope.pictures.colours import BLANK, FAINT, PALETTE, group_colours, thinned_values

VIRIDIS = colormaps["viridis"]


def places(picture: np.ndarray, colour: tuple[float, ...]) -> np.ndarray:
    """Mean (row, column) of the dots of a colour; NaN for none."""
    near = np.abs(picture[:, :, :3] - np.array(colour[:3])).max(axis=2) < 1.5 / 255
    return np.argwhere(near).mean(axis=0) if near.sum() > 500 else np.array([np.nan, np.nan])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_each_value_has_its_colour_at_its_place(dtype, tmp_path):
    values = np.array([[0.04, 0.25], [np.nan, 0.49]], dtype)
    draw_heat_map(tmp_path / "a.png", Matrix(values, ["a", "b"], ["a", "b"]), NONE)
    picture = imread(tmp_path / "a.png")[:, : -150 or None]
    colours = [VIRIDIS(0.2), VIRIDIS(0.5), to_rgb(BLANK), VIRIDIS(0.7)]
    upper_left, upper_right, lower_left, lower_right = (places(picture, colour) for colour in colours)
    assert upper_left[0] == pytest.approx(upper_right[0], abs=1) and lower_left[0] == pytest.approx(
        lower_right[0], abs=1
    )
    assert upper_left[1] == pytest.approx(lower_left[1], abs=1) and upper_right[1] == pytest.approx(
        lower_right[1], abs=1
    )
    assert upper_left[0] < lower_left[0] and upper_left[1] < upper_right[1]


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=20),
        elements=st.floats(0, 1, width=32) | st.just(np.nan),
    ),
    st.tuples(st.integers(1, 25), st.integers(1, 25)),
)
def test_no_peak_is_lost_when_cells_are_finer_than_dots(values, most):
    thin = thinned_values(values, most)
    assert thin.shape == tuple(map(min, values.shape, most))
    np.testing.assert_equal(np.fmax.reduce(thin, axis=None), np.fmax.reduce(values, axis=None))
    assert np.isnan(thin).all() == np.isnan(values).all()
    if thin.shape == values.shape:
        np.testing.assert_equal(thin, values)


def test_one_token_looked_at_among_thousands_stays_visible(tmp_path):
    values = np.zeros((3000, 3000), np.float32)
    values[1234, 567] = 1
    draw_heat_map(tmp_path / "a.png", Matrix(values, [""] * 3000, [""] * 3000), NONE)
    picture = imread(tmp_path / "a.png")
    square = picture[200:1200, 100:1100, :3]  # well inside the matrix
    assert (np.abs(square - np.array(VIRIDIS(1.0)[:3])).max(axis=2) < 0.01).any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (1, 5000), (7, 3)])
def test_matrices_of_every_shape_are_drawn(shape, tmp_path):
    matrix = Matrix(np.full(shape, 0.5), ["r"] * shape[0], ["c"] * shape[1])
    assert draw_heat_map(tmp_path / "a.png", matrix, Texts("title", "x", "y", "scale")) == ()
    assert draw_atlas(tmp_path / "b.png", [Row("", [Panel(matrix.values, "")])], NONE) == ()
    assert max(imread(tmp_path / "a.png").shape) < 3000


def test_captions_alike_in_every_row_stand_once_above_the_columns(tmp_path):
    atlas(tmp_path / "a.svg", Texts("title", "head", "layer", "share"))
    drawn = words(tmp_path / "a.svg")
    once = [*(f"head {head}" for head in range(4)), *(f"layer {layer}" for layer in range(3)), "KV 0", "KV 1"]
    assert [drawn.count(word) for word in [*once, "title", "head", "layer", "share"]] == [1] * (len(once) + 4)


def test_captions_that_differ_stand_above_their_panels(tmp_path):
    panels = [Panel(causal(3), f"head {head}", f"KV {head // 7}") for head in range(14)]
    draw_atlas(tmp_path / "a.svg", rows_by_group(panels), NONE)
    drawn = words(tmp_path / "a.svg")
    assert [word for word in drawn if word.startswith("head")] == [panel.caption for panel in panels]
    assert [drawn.count("KV 0"), drawn.count("KV 1")] == [1, 1]


@given(st.lists(st.integers(1, 20), max_size=6))
def test_rows_by_group_lose_no_panel_and_mix_no_groups(sizes):
    panels = [Panel(causal(1), f"{g}.{i}", f"KV {g}") for g, size in enumerate(sizes) for i in range(size)]
    rows = rows_by_group(panels)
    assert [panel for row in rows for panel in row.panels] == panels
    assert all(len(row.panels) <= 8 for row in rows)
    if len(sizes) < len(panels):
        assert all(len({panel.group for panel in row.panels}) == 1 for row in rows)
        assert [row.caption for row in rows if row.caption] == [f"KV {g}" for g in range(len(sizes))]


def test_groups_have_colours_of_their_own_or_all_none():
    eight = group_colours([f"KV {head // 4}" for head in range(32)])
    assert list(eight.values()) == list(PALETTE) and len(set(PALETTE)) == 8
    assert set(group_colours([f"KV {head // 2}" for head in range(32)]).values()) == {FAINT}


def test_what_does_not_fit_together_is_refused(tmp_path):
    with pytest.raises(ValueError, match="labels"):
        Matrix(causal(2), ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="cells"):
        Matrix(causal(2), ["a", "b"], ["a", "b"], [["x"], ["y"]])
    with pytest.raises(ValueError, match="no panel"):
        draw_atlas(tmp_path / "a.png", [Row("", [])], NONE)
    with pytest.raises(ValueError, match="no values"):
        draw_heat_map(tmp_path / "a.png", Matrix(np.zeros((0, 0)), [], []), NONE)
    with pytest.raises(ValueError, match="no line"):
        draw_curves(tmp_path / "a.png", [], NONE)


def test_curves_count_whole_things_in_whole_steps_from_zero(tmp_path):
    layers = np.arange(4.0)
    draw_curves(tmp_path / "a.svg", [Curve("entropy", layers, layers + 3)], Texts("", "layer", "nats"))
    drawn = words(tmp_path / "a.svg")
    assert {"0", "1", "2", "3"} <= set(drawn)
    assert not {"0.5", "1.5", "2.5"} & set(drawn)
    draw_curves(tmp_path / "a.svg", [Curve("loss", layers, -layers)], NONE)
    assert any(word.startswith("−") for word in words(tmp_path / "a.svg"))
