"""Consoles, safe text and progress. Tokens are untrusted: they become Text objects, never markup."""

import sys
import unicodedata
from functools import cache

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from decodescope.locale import translate as t

_PICTURES = {"\n": "↵", "\t": "⇥"}
PLAIN_WIDTH = 120  # columns where the output is no terminal


@cache
def out() -> Console:
    """Standard output."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


@cache
def err() -> Console:
    """Standard error, for progress and remarks."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def visible(text: str, keep_newlines: bool = False) -> str:
    """Text that cannot command a terminal: control, bidi and other invisible characters get a visible form."""
    return "".join(c if keep_newlines and c == "\n" else _visible(c) for c in text)


def _visible(character: str) -> str:
    if character in _PICTURES:
        return _PICTURES[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    joiner = code == 0x200D  # between emoji it is part of the picture
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and not joiner:
        return f"⟨U+{code:04X}⟩"
    return character


def token_text(text: str) -> str:
    """A token for display: leading and trailing spaces made visible, an empty one named."""
    shown = visible(text)
    stripped = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    after = len(shown) - len(shown.rstrip(" ")) if stripped else 0
    return "␣" * before + stripped + "␣" * after if shown else "∅"


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of text; a part may be (text, style)."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


class StderrReport:
    """Progress of finding, fetching and loading a model: lines, and a bar where there is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __call__(self, text: str, progress: tuple[int, int] | None = None, /) -> None:
        if progress is None:
            self.close()
            err().print(Text(visible(text)), style="dim")
        elif err().is_terminal:
            self._draw(text, *progress)

    def loading(self, done: int, total: int) -> None:
        """A step of loading the weights, in bytes."""
        self(t("run.loading"), (done, total))

    def close(self) -> None:
        """Take the bar away."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _draw(self, text: str, done: int, total: int) -> None:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns, console=err(), transient=True)
            self._progress.start()
            self._progress.add_task(visible(text), total=total)
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=done, total=total, description=visible(text))
        if done >= total:
            self.close()
