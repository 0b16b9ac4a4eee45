"""The command line in process (fast) and as a program of its own (exit codes, signals, bytes)."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from decodescope.cli.main import main
from tiny_model import make_tiny_model


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def fault(self) -> str:
        """The one line of a fault: exactly one, with its prefix, and no traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("decodescope: error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("decodescope: error: ")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def program() -> Callable[..., Outcome]:
    def run(*arguments: str | bytes | Path, stdin: bytes = b"", **environment: str) -> Outcome:
        command = [sys.executable, "-m", "decodescope", *arguments]
        env = {**os.environ, **environment}
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=120, env=env)
        return Outcome(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8", "replace"))

    return run
