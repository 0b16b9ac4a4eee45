"""A picture is written whole, the same every time, or refused in one sentence."""

import resource
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from drawings import DRAWINGS, curves, heat_map
from matplotlib.image import imread

from decodescope.errors import InputError
from decodescope.pictures import check_picture

DRAWN = pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)


@DRAWN
def test_both_kinds_are_what_their_names_say(draw, tmp_path):
    for name in ("a.PNG", "a.svg"):
        assert draw(tmp_path / name) == ()
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert imread(tmp_path / "a.PNG").ndim == 3
    assert b"<svg " in (tmp_path / "a.svg").read_bytes()[:300]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.PNG", "a.svg"]


@DRAWN
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_drawing_is_the_same_file_whatever_the_settings_in_force(draw, suffix, tmp_path):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    draw(first)
    theirs = {"font.size": 30, "text.parse_math": True, "axes.facecolor": "red", "savefig.dpi": 20}
    with matplotlib.rc_context(theirs):
        draw(second)
        assert {key: matplotlib.rcParams[key] for key in theirs} == theirs
    assert first.read_bytes() == second.read_bytes()


def test_a_file_that_exists_is_replaced(tmp_path):
    path = tmp_path / "a.svg"
    path.write_text("old")
    curves(path)
    assert "old" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a", "a.jpg", "a.pdf", "a.png.gz", ".png"])
def test_other_kinds_are_refused(name, tmp_path):
    with pytest.raises(InputError, match=r"ends? in one of \.png, \.svg"):
        curves(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["folder.png", "missing/a.png", "file/a.png", f"{'a' * 300}.png"])
def test_a_place_that_cannot_be_written_is_refused_before_any_drawing(name, tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        check_picture(tmp_path / name)


def test_a_write_that_fails_half_way_leaves_the_old_picture_and_nothing_else(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            curves(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_sentence_tells_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'pip install "decodescope\[pictures\]"'):
        heat_map(tmp_path / "a.png", ["a"])


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path):
    program = """
import sys
from pathlib import Path
from drawings import curves
from decodescope.pictures import check_picture
check_picture(Path(sys.argv[1]))
assert "matplotlib" not in sys.modules
curves(Path(sys.argv[1]))
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a.png")]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parent)
