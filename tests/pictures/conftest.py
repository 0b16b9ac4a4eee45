"""A font with simplified Chinese, whatever the machine has installed."""

import shutil
from pathlib import Path

import pylopdf_fonts_zh_cn
import pytest
from matplotlib.font_manager import fontManager


@pytest.fixture(autouse=True, scope="session")
def chinese_font():
    fontManager.addfont(pylopdf_fonts_zh_cn.sans_path())


@pytest.fixture
def chinese_folder(tmp_path: Path) -> Path:
    """A folder of fonts: one with simplified Chinese, and a broken file."""
    folder = tmp_path / "fonts"
    folder.mkdir()
    shutil.copy(pylopdf_fonts_zh_cn.sans_path(), folder)
    (folder / "broken.ttf").write_bytes(b"no font")
    return folder
