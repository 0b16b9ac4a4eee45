"""What the commands that look at one prompt share: check, open the model, make the prompt ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from decodescope.cli.console import StderrReport
from decodescope.cli.run import read_prompt
from decodescope.errors import InputError

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
        session = Session.open(
            given["model"],
            dtype=given["dtype"],
            device=given["device"],
            threads=given["threads"],
            report=report,
            progress=report.loading,
        )
        yield session, session.prompt(text, chat=given["chat"], system=given["system"]), report
