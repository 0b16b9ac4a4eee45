"""Archive: the runs of a server in a folder, a run folder each; the oldest make way beyond a size."""

import logging
import random
import re
import secrets
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from decodescope.analysis.repeats import LoopFinder
from decodescope.errors import DecodescopeError, InputError
from decodescope.options import DEFAULT_CANDIDATES, RunOptions
from decodescope.trace.records import Run, Step, Trace
from decodescope.trace.schema import DATABASE
from decodescope.trace.store import TraceWriter

_log = logging.getLogger(__name__)
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


@dataclass(slots=True)
class _Record:
    """What is known of a request that is to be recorded: its writer, and whether it is one to be alarmed about."""

    writer: TraceWriter | None = None
    finder: LoopFinder = field(default_factory=LoopFinder)
    alarming: bool = False

    def see(self, step: Step) -> None:
        """A guard acted, or the text has begun to go round."""
        if not self.alarming:
            self.finder.push(step.token_id, step.text)
            self.alarming = bool(step.interventions) or self.finder.loop is not None


class Archive:
    """Records requests by a rule: `all`, `sample=SHARE`, or `on-alert`: those that loop, fail, or that a guard
    touches.

    A fault of the disk ends the record of a request, never the request. Raises InputError for another rule, and
    where the folder cannot be made.
    """

    def __init__(self, folder: Path, rule: str, most_bytes: int) -> None:
        self.path, self.rule, self.most_bytes = folder, rule, most_bytes
        self._share = _share(rule)
        self._records: dict[str, _Record] = {}  # of the requests that run, those to be recorded
        self._sizes: dict[str, int] = {}  # bytes of the runs that are over, as they were then
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sizes = {path.name: _size(path) for path in folder.iterdir() if _is_run(path)}
        except OSError as fault:
            raise InputError("serve.runs_folder", path=folder, reason=fault.strerror) from None

    def options_for(self, run_id: str, options: RunOptions) -> RunOptions:
        """How a request is to be run so that it can be recorded, if it is to be."""
        if random.random() >= self._share:
            return options
        self._records[run_id] = _Record()
        return replace(options, candidates=max(options.candidates, DEFAULT_CANDIDATES))

    def begin(self, run_id: str, run: Run) -> None:
        """A request begins to run; what an alert decides is written when it is over."""
        if run_id in self._records and self.rule != ON_ALERT:
            self._create(run_id, run)

    def write(self, run_id: str, step: Step) -> None:
        """Commit a step."""
        record = self._records.get(run_id)
        if record is not None and self.rule == ON_ALERT:
            record.see(step)
        elif record is not None and record.writer is not None:
            with self._recording(run_id):
                record.writer.write(step)

    def settle(self, run_id: str, trace: Trace | None) -> None:
        """A request is over, with this trace unless it never began: end its record, and make room."""
        record = self._records.get(run_id)
        if record is None:
            return
        end = trace.end if trace else None
        if trace and end and self.rule == ON_ALERT and (record.alarming or end.finish_reason == "error"):
            self._create(run_id, trace.run, trace.steps)
        if record.writer is not None and end is not None:
            with self._recording(run_id):
                record.writer.finish(replace(end, trace=str(self.path / run_id)))
        del self._records[run_id]
        if _is_run(self.path / run_id):
            self._sizes[run_id] = _size(self.path / run_id)
            self._make_room()

    def _create(self, run_id: str, run: Run, steps: Sequence[Step] = ()) -> None:
        with self._recording(run_id):
            writer = self._records[run_id].writer = TraceWriter.create(self.path / run_id, run)
            for step in steps:
                writer.write(step)

    @contextmanager
    def _recording(self, run_id: str) -> Iterator[None]:
        """What has been committed stays when the disk has a fault inside."""
        try:
            yield
        except (DecodescopeError, OSError, sqlite3.Error) as fault:
            _log.warning("run %s is recorded no further: %s", run_id, fault)
            record = self._records[run_id]
            with suppress(OSError, sqlite3.Error):
                if record.writer is not None:
                    record.writer.close()
                else:
                    (self.path / run_id).rmdir()  # an empty one
            record.writer = None

    def entries(self) -> list[Entry]:
        """The recorded runs, newest first."""
        names = sorted((path.name for path in self.path.iterdir() if _is_run(path)), reverse=True)
        return [self._entry(name) for name in names]

    def _entry(self, run_id: str) -> Entry:
        size = self._sizes.get(run_id)
        size_bytes = _size(self.path / run_id) if size is None else size
        return Entry(run_id, _moment(run_id).isoformat(), size_bytes, self.is_running(run_id))

    def is_running(self, run_id: str) -> bool:
        """Whether a run is still being written."""
        return run_id in self._records

    def folder(self, run_id: str) -> Path:
        """The folder of a recorded run. Raises InputError for a name that is none's."""
        path = self.path / run_id
        if not _ID.fullmatch(run_id) or not _is_run(path):
            raise InputError("serve.no_run", name=run_id[:80])
        return path

    def _make_room(self) -> None:
        while self._sizes and sum(self._sizes.values()) > self.most_bytes:
            oldest = min(self._sizes)  # names begin with the moment
            shutil.rmtree(self.path / oldest, ignore_errors=True)
            del self._sizes[oldest]


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


def _moment(run_id: str) -> datetime:
    """When a run began, by its name. Raises ValueError for a name that is no run's."""
    return datetime.strptime(run_id.rpartition("-")[0], _MOMENT).replace(tzinfo=UTC)


def _is_run(path: Path) -> bool:
    if not _ID.fullmatch(path.name) or path.is_symlink() or not (path / DATABASE).is_file():
        return False
    try:
        return bool(_moment(path.name))
    except ValueError:  # the thirteenth month
        return False


def _size(path: Path) -> int:
    """Bytes of the files in a run folder; of one that has just gone none."""
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return 0
