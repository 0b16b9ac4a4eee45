"""From drawing to file: checks before, one style for all, and a picture that appears whole or not at all."""

import errno
import io
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.errors import InputError
from decodescope.pictures.colours import FAINT, INK
from decodescope.pictures.fonts import CHINESE, FIRST, families_for
from decodescope.pictures.page import DOTS_PER_INCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def check_picture(path: Path) -> None:
    """Refuse at once what could not be drawn later: for use before long work. Raises InputError."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError("picture.suffix", path=path, known=", ".join(SUFFIXES))
    if find_spec("matplotlib") is None:
        raise InputError("picture.no_matplotlib")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except OSError as fault:
        raise _cannot_write(path, fault) from None


def _cannot_write(path: Path, fault: OSError) -> InputError:
    return InputError("picture.cannot_write", path=path, reason=fault.strerror or fault)


def make_picture(path: Path, texts: Iterable[str], paint: Callable[["Figure"], None]) -> tuple[str, ...]:
    """Paint an empty figure and write it to `path`; `texts` are all that will be written in it.

    Returns the characters that no installed font draws: none for .svg, whose viewer brings the fonts.
    Raises InputError.
    """
    check_picture(path)
    from matplotlib import style
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    families, missing = families_for(texts)
    # The defaults first: a matplotlibrc in the user's folder must not change what we draw.
    with style.context(["default", _settings(families)]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # they are in `missing`
        figure = Figure()
        paint(figure)
        _write(path, _encoded(figure, kind))
    return () if kind == "svg" else missing


def _settings(families: list[str]) -> dict[str, object]:
    return {
        # The generic name stands for a list, which SVG spells out; matplotlib itself may use its last.
        "font.family": [*families, "sans-serif"],
        "font.sans-serif": [*CHINESE, FIRST],
        "text.parse_math": False,  # a token like $x$ is not a formula
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "image.composite_image": False,  # each matrix stays as sharp as it is
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "decodescope",  # the same drawing is the same file
    }


def _encoded(figure: "Figure", kind: str) -> bytes:
    stream = io.BytesIO()
    unsigned: dict[str, str | None] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(stream, format=kind, dpi=DOTS_PER_INCH, bbox_inches="tight", pad_inches=0.2, metadata=unsigned)
    return stream.getvalue()


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".decodescope-{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as fault:
        raise _cannot_write(path, fault) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
