"""Archive: the runs of a server in a folder, a run folder each; the oldest make way beyond a size."""

import random
import re
import secrets
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from decodescope.analysis.repeats import find_loop
from decodescope.errors import InputError
from decodescope.options import DEFAULT_CANDIDATES, RunOptions
from decodescope.trace.records import Trace
from decodescope.trace.schema import DATABASE
from decodescope.trace.store import TraceWriter

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}", re.ASCII)
_MOMENT = "%Y%m%d-%H%M%S"
ALL, ON_ALERT, SAMPLE = "all", "on-alert", "sample="


def new_run_id() -> str:
    """A name that says when (UTC) and is like no other."""
    return f"{datetime.now(UTC).strftime(_MOMENT)}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded run."""

    run_id: str
    started_at: str  # ISO 8601, UTC
    size_bytes: int
    running: bool


class Archive:
    """Records requests by a rule: `all`, `sample=SHARE`, or `on-alert`: those that `is_alert` tells of.

    Raises InputError for another rule, and where the folder cannot be made.
    """

    def __init__(self, folder: Path, rule: str, most_bytes: int) -> None:
        self.path, self.rule, self.most_bytes = folder, rule, most_bytes
        self._share = _share(rule)
        self._running: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise InputError("serve.runs_folder", path=folder, reason=fault.strerror) from None

    def options_for(self, run_id: str, options: RunOptions) -> RunOptions:
        """How a request is to be run so that it can be recorded, if it is to be."""
        if self.rule != ON_ALERT and random.random() >= self._share:
            return options
        full = replace(options, candidates=max(options.candidates, DEFAULT_CANDIDATES))
        if self.rule == ON_ALERT:  # kept in memory until it is known
            return full
        self._running.add(run_id)
        return replace(full, save=self.path / run_id)

    def settle(self, run_id: str, trace: Trace) -> None:
        """A request is over: keep it if that is known only now, and make room. Raises ResourceError."""
        if self.rule == ON_ALERT and is_alert(trace):
            self._running.add(run_id)  # listed as such until it is whole
            _write(self.path / run_id, trace)
        self._running.discard(run_id)
        self._make_room()

    def entries(self) -> list[Entry]:
        """The recorded runs, newest first."""
        found = [_entry(path, path.name in self._running) for path in self.path.iterdir() if _is_run(path)]
        return sorted(found, key=lambda entry: entry.run_id, reverse=True)

    def is_running(self, run_id: str) -> bool:
        """Whether a run is still being written."""
        return run_id in self._running

    def folder(self, run_id: str) -> Path:
        """The folder of a recorded run. Raises InputError for a name that is none's."""
        path = self.path / run_id
        if not _ID.fullmatch(run_id) or not _is_run(path):
            raise InputError("serve.no_run", name=run_id[:80])
        return path

    def _make_room(self) -> None:
        entries = self.entries()
        taken = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if taken <= self.most_bytes:
                return
            if not entry.running:
                shutil.rmtree(self.path / entry.run_id, ignore_errors=True)
                taken -= entry.size_bytes


def is_alert(trace: Trace) -> bool:
    """Whether something went wrong in a run: it failed, a guard acted, or its text ended in a loop."""
    failed = trace.end is not None and trace.end.finish_reason == "error"
    path = trace.path()
    if failed or any(step.interventions for step in path):
        return True
    return find_loop([step.token_id for step in path], [step.text for step in path]) is not None


def _write(folder: Path, trace: Trace) -> None:
    writer = TraceWriter.create(folder, trace.run)
    try:
        for step in trace.steps:
            writer.write(step)
        if trace.end is not None:
            writer.finish(replace(trace.end, trace=str(folder)))
    finally:
        writer.close()


def _share(rule: str) -> float:
    """The share of requests that a rule records."""
    if rule in (ALL, ON_ALERT):
        return 1.0
    try:
        share = float(rule.removeprefix(SAMPLE)) if rule.startswith(SAMPLE) else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InputError("serve.record", rule=rule[:80])
    return share


def _is_run(path: Path) -> bool:
    return bool(_ID.fullmatch(path.name)) and not path.is_symlink() and (path / DATABASE).is_file()


def _entry(path: Path, running: bool) -> Entry:
    started = datetime.strptime(path.name.rpartition("-")[0], _MOMENT).replace(tzinfo=UTC)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Entry(path.name, started.isoformat(), size, running)
