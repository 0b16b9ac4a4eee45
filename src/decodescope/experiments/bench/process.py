"""An engine's process as an object: open it, give it tasks, let go of it; and a pool that keeps memory in mind."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil

from decodescope import errors
from decodescope.experiments.bench.messages import (
    CacheTask,
    CacheTimes,
    Contender,
    DecodeTask,
    Opened,
    PrefillTask,
    Resident,
    Setup,
    Timed,
    tuples,
)
from decodescope.experiments.cache_records import Timing

_WORKER = "decodescope.experiments.bench.worker"
_CALM_S = 5  # for a process to end when its input does
_TOLD = 300  # characters of what a process said last
_SPARE_BYTES = 1 << 30  # beside the weights: libraries, activations, this process


class EngineFault(Exception):
    """An engine that could not do what it was asked for; `str()` is what it said."""


class Process:
    """One engine, open until `close`. Raises EngineFault or the fault of ours that happened inside."""

    def __init__(self, setup: Setup, portable: bool = False) -> None:
        self.tried_out: set[object] = set()  # what it has done once
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        # Without a search path no compiler is found.
        environment = {**os.environ, "PATH": ""} if portable else None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER],  # -P: nothing is imported from where the user stands
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            self.opened = Opened(**self._ask("open", setup))
            self.at_start = self.memory()
        except BaseException:
            self.close()
            raise

    def decode(self, task: DecodeTask) -> Timed:
        """Seconds of the new tokens."""
        return Timed(**self._ask("decode", task))

    def prefill(self, task: PrefillTask) -> Timed:
        """Seconds of the prompt."""
        return Timed(**self._ask("prefill", task))

    def cache(self, task: CacheTask) -> CacheTimes:
        """With and without the cache."""
        found = self._ask("cache", task)
        return CacheTimes(*(tuple(Timing(**each) for each in found[way]) for way in ("cached", "uncached")))

    def memory(self) -> Resident:
        """Of the engine's process."""
        return Resident(**self._ask("memory"))

    def close(self) -> None:
        """End the process: at once if it is at work."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_CALM_S)
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that a dead process never read
                    stream.close()

    def _ask(self, what: str, task: Any = None) -> dict[str, Any]:
        request = {"ask": what, **(asdict(task) if task else {})}
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFault(self._last_words())
        return _done(tuples(json.loads(line)))

    def _last_words(self) -> str:
        code = self._process.wait(_CALM_S)
        self._said.seek(0)
        said = self._said.read().split("\n")
        last = next((text for text in reversed(said) if text.strip()), "")
        return f"exit code {code} {' '.join(last.split())}"[:_TOLD].strip()


def _done(answer: dict[str, Any]) -> dict[str, Any]:
    if "fault" in answer:
        raise getattr(errors, answer["fault"])(answer["key"], **answer["values"])
    if "failed" in answer:
        raise EngineFault(answer["failed"])
    done: dict[str, Any] = answer["done"]
    return done


class Pool:
    """Contenders that are open. Where memory cannot hold the next one beside them, they are closed first, so that
    large models take turns."""

    def __init__(self, setup_of: Callable[[Contender], Setup], bytes_of: Callable[[Contender], int]) -> None:
        self._setup_of, self._bytes_of = setup_of, bytes_of
        self._open: dict[Contender, Process] = {}
        self.opened: dict[Contender, Opened] = {}  # all that ever were
        self.ready: dict[Contender, Resident] = {}
        self.peaks: dict[Contender, Resident] = {}
        self.took_turns = False

    def get(self, contender: Contender) -> Process:
        """The contender's process, opened if it is not. Raises as `Process` does."""
        if contender not in self._open:
            if self._open and self._bytes_of(contender) + _SPARE_BYTES > psutil.virtual_memory().available:
                self.took_turns = True
                self.remember()
                self.close()
            process = self._open[contender] = Process(self._setup_of(contender), contender.portable)
            self.opened[contender], self.ready[contender] = process.opened, process.at_start
        return self._open[contender]

    def remember(self) -> None:
        """Take down how much memory every open contender has come to hold."""
        for contender, process in self._open.items():
            self.peaks[contender] = process.memory()

    def drop(self, contender: Contender) -> None:
        """Close one, such as one that has failed."""
        process = self._open.pop(contender, None)
        if process is not None:
            process.close()

    def close(self) -> None:
        """Close all."""
        for contender in list(self._open):
            self.drop(contender)
