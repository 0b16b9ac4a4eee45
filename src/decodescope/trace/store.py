"""A run on disk: a folder with `trace.db` and, where asked for, blocks of tensors. See docs/trace-format.md.

One step is one transaction: a killed process loses no committed step, and a reader may look at any time.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decodescope.errors import InputError, ResourceError
from decodescope.trace.opening import opened
from decodescope.trace.records import End, Run, Stage, Step, Trace, path_to
from decodescope.trace.rows import (
    FilterKey,
    candidate_rows,
    end_row,
    filter_key,
    node_row,
    run_rows,
    stage_rows,
    tensor_rows,
)
from decodescope.trace.schema import DATABASE, build
from decodescope.trace.tables import CANDIDATE, ENDING, FILTER, NODE, STAGE, TENSOR
from decodescope.trace.tensors import SavedTensor, block_file, write_block

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
        self._filters: dict[FilterKey, int] = {}
        self._blocks = 0

    @classmethod
    def create(cls, folder: Path, run: Run) -> Self:
        """Start a run in `folder`, which must be empty or absent (missing parents are made).

        Raises InputError when the folder is in use, is a file or cannot be written; ResourceError when
        the disk is full.
        """
        rows = run_rows(run)
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
        with self._transaction() as connection:
            connection.executemany(FILTER.insert, [(number, *key) for key, number in filters.items()])
            connection.execute(NODE.insert, node_row(step))
            connection.executemany(CANDIDATE.insert, candidate_rows(step))
            connection.executemany(STAGE.insert, stage_rows(step, known))
        # Only what is committed is known: an interrupt may have rolled the step back.
        self._filters = known
        self._nodes.add(step.node)
        self._last = step.node

    def write_tensors(self, tensors: Mapping[str, Any], node: int | None = None) -> None:
        """Save numpy arrays or torch tensors as one block, indexed under `node` (default: the last written).

        The file is complete before it is named and named before it is indexed. Raises ResourceError.
        """
        if self.failed or not tensors:
            return
        block, at = self._blocks + 1, self._last if node is None else node
        try:
            entries = write_block(self.folder, block, at, tensors)
        except OSError as fault:
            raise self._broken(fault) from fault
        with self._transaction() as connection:
            connection.executemany(TENSOR.insert, tensor_rows(block, entries))
        self._blocks = block

    def finish(self, end: End) -> None:
        """Commit the end of the run and close; a single `trace.db` is left. Raises ResourceError."""
        try:
            if not self.failed:
                with self._transaction() as connection:
                    connection.execute(ENDING.insert, end_row(end))
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

    def _new_filters(self, stages: tuple[Stage, ...]) -> dict[FilterKey, int]:
        fresh = [key for key in dict.fromkeys(map(filter_key, stages)) if key not in self._filters]
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

    Without an end record the end is put together from the steps, finish reason `interrupted`; `End.trace`
    is `folder`. Raises InputError when the folder holds no run, a newer one, or a damaged one.
    """
    with opened(folder) as reader:
        run = reader.run()
        if run is None:
            raise InputError("trace.empty", path=folder)
        steps = reader.steps()
        end = reader.end(str(folder))
    return Trace(run, steps, end or _interrupted(run, steps, folder))


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """The index of the tensors saved with a run. Raises InputError as `read_trace` does."""
    with opened(folder) as reader:
        return [
            SavedTensor(block_file(block), name, node, dtype, reader.shape(shape), size)
            for block, name, node, dtype, shape, size in reader.rows(TENSOR)
        ]


def _interrupted(run: Run, steps: list[Step], folder: Path) -> End:
    """What can be said from the steps alone; None where they do not tell."""
    path = path_to(steps, steps[-1].node) if steps else []
    decode_s = sum(step.timing.total_s for step in path[1:])
    return End(
        finish_reason="interrupted",
        stop_token_id=None,
        text="".join(step.delta_text for step in path),
        prompt_tokens=len(run.prompt_tokens),
        new_tokens=len(path),
        ttft_s=steps[0].timing.forward_s + steps[0].timing.sample_s if steps else None,
        decode_tokens_per_s=(len(path) - 1) / decode_s if decode_s > 0 else None,
        peak_rss_bytes=max((step.memory.rss_bytes for step in steps), default=None),
        trace=str(folder),
    )


def _connect(folder: Path) -> sqlite3.Connection:
    """Claim an empty folder and open a new database in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError("trace.not_empty", path=folder)
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
