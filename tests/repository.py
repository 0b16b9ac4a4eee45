"""The repository as its files: what the tests of documents and house rules look at."""

import ast
import shutil
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "decodescope"
READMES = ("README.md", "README.zh-CN.md")
SECTION = {  # headings that tests look below, in both languages
    "missing": ("## What is not there yet", "## 还没有的东西"),
    "try": ("## Ten more things to try", "## 再试十件事"),
}


@cache
def files() -> tuple[PurePosixPath, ...]:
    """Every file that git keeps or would keep, relative to the root."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout; ends when the tests run in one")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return tuple(PurePosixPath(name) for name in sorted(set(listed)) if name and (ROOT / name).is_file())


def text(name: str | PurePosixPath) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    parts = document.split("\n```")
    return [part.partition("\n")[2] for part in parts[1::2] if part.partition("\n")[0] == language]


def below(document: str, headings: tuple[str, ...]) -> str:
    """The text between one of the headings and the next heading."""
    (heading,) = [heading for heading in headings if f"\n{heading}\n" in document]
    return document.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


@cache
def modules(*folders: str) -> dict[str, ast.Module]:
    """Python files below the folders as syntax trees, by path relative to the root."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
