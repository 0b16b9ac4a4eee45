"""What the commands that look at one prompt share: check, open the model, make the prompt ready; pictures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodescope.cli.console import StderrReport, err, line
from decodescope.cli.options import loading_of
from decodescope.cli.run import read_prompt
from decodescope.errors import InputError
from decodescope.locale import translate as t

if TYPE_CHECKING:
    from decodescope.session import Session
    from decodescope.text.chat import Prompt


@contextmanager
def opened(given: dict[str, Any]) -> Iterator[tuple["Session", "Prompt", StderrReport]]:
    """A session and a ready prompt, from a command's options by their names; progress goes to standard error.

    Raises InputError for what can be refused, before the model is loaded where possible.
    """
    if given["engine"] != "native":
        raise InputError("engine.unknown", name=given["engine"])
    text = read_prompt(given["prompt"])
    from decodescope.session import Session

    with StderrReport() as report:
        session = Session.open(given["model"], report=report, progress=report.loading, **loading_of(given))
        yield session, session.prompt(text, chat=given["chat"], system=given["system"]), report


def check_image(path: Path) -> None:
    """Refuse a picture that could not be written, before any work. Raises InputError."""
    from decodescope.pictures import check_picture

    check_picture(path)


def tell_image(path: Path, missing: Sequence[str]) -> None:
    """Say that a picture was written, and which characters no font could draw in it."""
    if missing:
        err().print(line((t("picture.no_font", characters=" ".join(missing)), "yellow")))
    err().print(line((t("picture.written", path=path), "dim")))
