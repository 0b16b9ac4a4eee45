"""A run on disk: a folder with `trace.db` and, where asked for, blocks of tensors. See docs/trace-format.md.

One step is one transaction: a killed process loses no committed step, and a reader may look at any time.
"""

import errno
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decodescope.errors import InputError, ResourceError
from decodescope.trace.opening import opened
from decodescope.trace.records import End, Run, Setting, Stage, Step, Trace, end_of
from decodescope.trace.schema import DATABASE, build
from decodescope.trace.site_records import SiteSummary
from decodescope.trace.tables import (
    CANDIDATE,
    ENDING,
    FILTER,
    NODE,
    NOTE,
    PROMPT_TOKEN,
    RUN,
    SETTING,
    SITE,
    STAGE,
    STOP,
    TENSOR,
    VERSION,
    Row,
    Table,
)
from decodescope.trace.tensors import SavedTensor, block_file, write_block

_FilterKey = tuple[str, str]
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# SQLite says FULL for ENOSPC alone; a quota or a file size limit is a refused write to it.
_FULL_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}


class TraceWriter:
    """Writes one run into its folder; one thread at a time.

    The first fault of the disk is raised as ResourceError; after it every call does nothing, and the steps
    committed before stay readable. Leaving the context without `finish` leaves an interrupted run.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder, self.failed = folder, False
        self._connection = connection
        self._nodes: set[int | None] = {None}
        self._last: int | None = None
        self._filters: dict[_FilterKey, int] = {}
        self._blocks = self._sites = 0

    @classmethod
    def create(cls, folder: Path, run: Run) -> Self:
        """Start a run in `folder`, which must be empty or absent (missing parents are made).

        Raises InputError when the folder is in use, is a file or cannot be written; ResourceError when
        the disk is full.
        """
        rows = _run_rows(run)
        writer = cls(folder, _connect(folder))
        try:
            with writer._transaction() as connection:
                build(connection)
                for table, values in rows.items():
                    connection.executemany(table.insert, values)
        except BaseException:
            writer._abandon()
            raise
        return writer

    def write(self, step: Step) -> None:
        """Commit one step.

        Node ids must grow and a parent comes before its children: ValueError otherwise. Raises ResourceError.
        """
        if self.failed:
            return
        if step.parent not in self._nodes or (self._last is not None and step.node <= self._last):
            raise ValueError(f"node {step.node} under {step.parent} comes out of order")
        filters = self._new_filters(step.stages)
        known = self._filters | filters
        stages = [
            (step.node, i, known[_filter_key(stage)], *STAGE.kept(stage)) for i, stage in enumerate(step.stages)
        ]
        with self._transaction() as connection:
            connection.executemany(FILTER.insert, [(number, *key) for key, number in filters.items()])
            connection.execute(NODE.insert, NODE.kept(step))
            connection.executemany(CANDIDATE.insert, _rows(CANDIDATE, step.candidates, step.node))
            connection.executemany(STAGE.insert, stages)
        # Only what is committed is known: an interrupt may have rolled the step back.
        self._filters = known
        self._nodes.add(step.node)
        self._last = step.node

    def write_sites(self, summaries: Sequence[SiteSummary], node: int) -> None:
        """Commit what was seen of inner values in the passes that lead to `node`. Raises ResourceError."""
        if self.failed or not summaries:
            return
        rows = [(id, node, *SITE.kept(each)) for id, each in enumerate(summaries, self._sites)]
        with self._transaction() as connection:
            connection.executemany(SITE.insert, [(*row[:5], json.dumps(row[5]), *row[6:]) for row in rows])
        self._sites += len(summaries)

    def write_tensors(self, tensors: Mapping[str, Any], node: int | None = None) -> list[SavedTensor]:
        """Save numpy arrays or torch tensors as one block, indexed under `node` (default: the last written).

        The file is complete before it is named and named before it is indexed; returns the index entries.
        Raises ResourceError.
        """
        if self.failed or not tensors:
            return []
        block, at = self._blocks + 1, self._last if node is None else node
        try:
            entries = write_block(self.folder, block, at, tensors)
        except OSError as fault:
            raise self._broken(fault) from fault
        with self._transaction() as connection:
            connection.executemany(
                TENSOR.insert, [(block, t.name, t.node, t.dtype, json.dumps(t.shape), t.bytes) for t in entries]
            )
        self._blocks = block
        return entries

    def finish(self, end: End) -> None:
        """Commit the end of the run and close; a single `trace.db` is left. Raises ResourceError."""
        try:
            if not self.failed:
                with self._transaction() as connection:
                    connection.execute(ENDING.insert, (1, *ENDING.kept(end)))
        finally:
            self.close()

    def close(self) -> None:
        """Close the database; without `finish` the run reads as interrupted."""
        if not self.failed:
            with suppress(sqlite3.Error):  # closed already, or a reader holds the log: it stays, readable
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()

    def _abandon(self) -> None:
        """Leave the folder as empty as it was found."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            (self.folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_filters(self, stages: tuple[Stage, ...]) -> dict[_FilterKey, int]:
        fresh = [key for key in dict.fromkeys(map(_filter_key, stages)) if key not in self._filters]
        return {key: number for number, key in enumerate(fresh, len(self._filters) + 1)}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; a fault of the disk is told once."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as fault:
            raise self._broken(fault) from fault
        except UnicodeEncodeError as fault:
            raise InputError("trace.not_unicode", path=self.folder, text=ascii(fault.object)[:60]) from fault
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.rollback()

    def _broken(self, fault: Exception) -> ResourceError:
        self.failed = True
        steps = len(self._nodes) - 1
        if _is_full(fault):
            return ResourceError("trace.disk_full", path=self.folder, steps=steps)
        return ResourceError("trace.cannot_write", path=self.folder, steps=steps, reason=fault)


def read_trace(folder: Path) -> Trace:
    """The run in a folder, whether it has ended, is still being written, or was killed.

    Without an end record the end is what `end_of` says of the branch of the last step, finish reason
    `interrupted`; `End.trace` is `folder`. Raises InputError when the folder holds no run, a newer one, or a
    damaged one.
    """
    with opened(folder) as reader:
        run = reader.run()
        if run is None:
            raise InputError("trace.empty", path=folder)
        trace = Trace(run, reader.steps())
        trace.end = reader.end(trace.steps, str(folder))
    if trace.end is None:
        trace.end = replace(end_of(run, trace.path(), "interrupted"), trace=str(folder))
    return trace


def read_sites(folder: Path) -> list[SiteSummary]:
    """What was seen of inner values on the branch that was kept, in the order of computation.

    A pass after which nothing could be chosen belongs to it too. Raises InputError as `read_trace` does.
    """
    trace = read_trace(folder)
    parents = {step.node: step.parent for step in trace.steps}
    saved: dict[int, list[SiteSummary]] = {}
    with opened(folder) as reader:
        for _, node, *values in reader.rows(SITE):
            saved.setdefault(node, []).append(SiteSummary(*values))
    # Tokens that follow the same one were chosen from the same pass, whichever of them it is saved under.
    after = {parents[node]: found for node, found in saved.items() if node in parents}
    unchosen = [found for node, found in saved.items() if node not in parents]
    return list(chain(*(after.get(step.parent, []) for step in trace.path()), *unchosen))


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """The index of the tensors saved with a run. Raises InputError as `read_trace` does."""
    with opened(folder) as reader:
        return [SavedTensor(block_file(block), *values) for block, *values in reader.rows(TENSOR)]


def _run_rows(run: Run) -> dict[Table, list[Row]]:
    """The rows of everything known before the first step."""
    stops = [(token_id, None) for token_id in run.stop_ids] + [(None, text) for text in run.stop_strings]
    return {
        RUN: [(1, *RUN.kept(run))],
        SETTING: [(i, _value_type(each), *SETTING.kept(each)) for i, each in enumerate(run.settings)],
        STOP: [(i, *stop) for i, stop in enumerate(stops)],
        VERSION: [(i, *version) for i, version in enumerate(run.versions.items())],
        NOTE: list(enumerate(run.notes)),
        PROMPT_TOKEN: _rows(PROMPT_TOKEN, run.prompt_tokens),
    }


def _rows(table: Table, records: Sequence[Any], *key: int) -> list[Row]:
    """Records in their order, numbered after `key`."""
    return [(*key, ordinal, *kept) for ordinal, kept in enumerate(map(table.kept, records))]


def _value_type(setting: Setting) -> str:
    if isinstance(setting.value, float) and not math.isfinite(setting.value):
        raise ValueError(f"setting {setting.name} is not a finite number")
    return type(setting.value).__name__


def _filter_key(stage: Stage) -> _FilterKey:
    """What makes two stages of different steps the same filter: name and settings, these as JSON."""
    return stage.name, json.dumps(stage.settings, ensure_ascii=False, allow_nan=False)


def refuse_used(folder: Path) -> None:
    """Raise InputError where a run folder could not be made because something is there already."""
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError("trace.not_empty", path=folder)


def _connect(folder: Path) -> sqlite3.Connection:
    """Claim an empty folder and open a new database in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_used(folder)
        os.close(os.open(folder / DATABASE, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        connection = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False)
    except (FileExistsError, NotADirectoryError) as fault:
        file = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        raise InputError("trace.is_file", path=file) from fault
    except (OSError, sqlite3.OperationalError) as fault:
        raise _cannot_create(folder, fault) from fault
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.OperationalError as fault:
        connection.close()
        raise _cannot_create(folder, fault) from fault
    return connection


def _cannot_create(folder: Path, fault: Exception) -> InputError | ResourceError:
    if _is_full(fault):
        return ResourceError("trace.disk_full", path=folder, steps=0)
    reason = getattr(fault, "strerror", None) or fault
    return InputError("trace.cannot_create", path=folder, reason=reason)


def _is_full(fault: Exception) -> bool:
    code = getattr(fault, "sqlite_errorcode", None)
    return code in _FULL_SQLITE or getattr(fault, "errno", None) in _FULL
