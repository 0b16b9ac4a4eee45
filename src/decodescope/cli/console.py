"""Consoles and progress. Tokens are untrusted: they become Text objects, never markup."""

import sys
from collections.abc import Iterable
from functools import cache
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.visible import visible

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


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of text that is safe to print; a part may be (text, style)."""
    shown = [visible(p) if isinstance(p, str) else (visible(p[0]), p[1]) for p in parts]
    return Text.assemble(*shown, no_wrap=True, overflow="ignore")


def asked(prompt: str = "") -> str | None:
    """A line that the reader types; None where the input has ended, or was closed from the start."""
    try:
        return input(prompt)
    except (EOFError, RuntimeError):
        return None


def draw_notes(notes: Iterable[str]) -> None:
    """What the reader of a run should know: catalogue keys, some with a detail behind a colon."""
    for note in notes:
        key, _, detail = note.partition(":")
        out().print(line(("! " + translate_or(key, note).replace("{detail}", detail), "yellow")))


class StderrReport:
    """Progress of finding, fetching and loading a model: lines, and a bar where there is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._told = ""  # the part of a long measurement that was told last

    def __call__(self, text: str, progress: tuple[int, int] | None = None, /) -> None:
        if progress is None:
            self.close()
            err().print(Text(visible(text)), style="dim")
        elif err().is_terminal:
            self._draw(text, *progress, DownloadColumn(), TransferSpeedColumn())

    def loading(self, done: int, total: int) -> None:
        """A step of loading the weights, in bytes."""
        self(t("run.loading"), (done, total))

    def reading(self, done: int, total: int) -> None:
        """A part of a long prompt is read, in positions."""
        if err().is_terminal:
            self._draw(t("run.reading"), done, total, MofNCompleteColumn())

    def decoding(self, done: int, most: int) -> None:
        """Some rows have come so far, in tokens."""
        if err().is_terminal:
            self._draw(t("sample.decoding"), done, most, MofNCompleteColumn())

    def measuring(self, done: int, total: int) -> None:
        """A part of an experiment is done, in positions that went through the model."""
        if err().is_terminal:
            self._draw(t("kv.measuring"), done, total, MofNCompleteColumn())

    def timing(self, part: str, done: int, total: int) -> None:
        """A measurement is about to be made; without a terminal each part is told once."""
        if err().is_terminal:
            self._draw(part, done, total, MofNCompleteColumn())
        elif part != self._told:
            self._told = part
            err().print(line((part, "dim")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _draw(self, text: str, done: int, total: int, *figures: ProgressColumn) -> None:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), *figures)
            self._progress = Progress(*columns, console=err(), transient=True)
            self._progress.start()
            self._progress.add_task(visible(text), total=total)
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=done, total=total, description=visible(text))
        if done >= total:
            self.close()
