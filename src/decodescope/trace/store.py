"""A run on disk: a folder with `trace.db` and, where asked for, blocks of tensors. See docs/trace-format.md.

One step is one transaction: a killed process loses no committed step, and a reader may look at any time.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decodescope.errors import InputError, ResourceError
from decodescope.trace.folder import FolderLock, claim, discard, is_full, opened_to_write, refuse_unfit
from decodescope.trace.records import Branch, End, Run, Setting, Stage, Step, Trace
from decodescope.trace.rows import (
    FilterKey,
    Rows,
    branch_rows,
    branch_setting_rows,
    filter_key,
    run_rows,
    step_rows,
)
from decodescope.trace.saved import read_outline
from decodescope.trace.schema import build
from decodescope.trace.site_records import SiteSummary
from decodescope.trace.tables import ENDING, FILTER, REOPENED, SITE, TENSOR
from decodescope.trace.tensors import SavedTensor, write_block

# Where the number of a node may stand: also of one that was looked at and never chosen.
_NODE_COLUMNS = ("node.id", *(f"{name}.node_id" for name in (
    "candidate", "stage", "draw", "stage_prob", "intervention", "site", "tensor",
)))  # fmt: skip
_MOST = 2**53  # no run counts up to here


class TraceWriter:
    """Writes one run into its folder, or forks into the folder of an earlier one; one thread at a time.

    The first fault of the disk is raised as ResourceError; after it every call does nothing, and the steps
    committed before stay readable. Leaving the context without `finish` or `write_branch` leaves an interrupted
    run or fork. Until it is closed no other writer can have the folder.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: FolderLock) -> None:
        self.folder, self.failed = folder, False
        self._connection, self._lock = connection, lock
        self._nodes: set[int | None] = {None}
        self._last: int | None = None
        self._filters: dict[FilterKey, int] = {}
        self._blocks = self._sites = self._branches = 0
        self._forks: tuple[Setting, ...] | None = None  # the settings of forks; None: writes the run itself
        self._settled: int | None = None  # nodes from here on are of no fork that has ended

    @classmethod
    def create(cls, folder: Path, run: Run) -> Self:
        """Start a run in `folder`, which must be empty or absent (missing parents are made).

        Raises InputError when the folder is in use, is a file or cannot be written; ResourceError when
        the disk is full.
        """
        rows = run_rows(run)
        with ExitStack() as undo:
            lock = claim(folder)
            undo.callback(lock.release)
            undo.callback(discard, folder)
            writer = cls(folder, opened_to_write(folder, "trace.cannot_create"), lock)
            undo.callback(writer.close)
            with writer._transaction() as connection:
                build(connection)
                _insert(connection, rows)
            undo.pop_all()
        return writer

    @classmethod
    def reopen(cls, folder: Path, settings: Sequence[Setting] = ()) -> Self:
        """Open the folder of a run that has ended, or was killed, to add forks to it.

        `settings` are what the forks have other than the run: kept at once, so that a fork that is killed has them
        too. All or nothing, an older format is brought up to date, and a run or fork without an end is given its
        interrupted one. Raises InputError as `read_outline` does, also when the run is still being written or may
        not be written to; ResourceError when the disk is full.
        """
        with ExitStack() as undo:
            lock = FolderLock(folder)
            undo.callback(lock.release)
            trace = read_outline(folder)
            refuse_unfit(folder)
            writer = cls(folder, opened_to_write(folder, "trace.cannot_reopen"), lock)
            undo.callback(writer.close)
            writer._take_up(trace, tuple(settings))
            undo.pop_all()
        return writer

    @property
    def next_node(self) -> int:
        """The lowest id that a new node may have."""
        return 0 if self._last is None else self._last + 1

    def write(self, step: Step) -> None:
        """Commit one step.

        Node ids must grow, a parent comes before its children, and a stage has no probabilities or one for each
        candidate: ValueError otherwise. Raises ResourceError.
        """
        if self.failed:
            return
        if step.parent not in self._nodes or (self._last is not None and step.node <= self._last):
            raise ValueError(f"node {step.node} under {step.parent} comes out of order")
        filters = self._new_filters(step.stages)
        known = self._filters | filters
        rows = step_rows(step, known)
        with self._transaction() as connection:
            connection.executemany(FILTER.insert, [(number, *key) for key, number in filters.items()])
            _insert(connection, rows)
            self._last = step.node  # taken, even where an interrupt hides whether the step was committed
        # Only what is committed is known: an interrupt may have rolled the step back.
        self._filters = known
        self._nodes.add(step.node)

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
        """Commit the end of the run and close; a single `trace.db` is left.

        Raises ResourceError; ValueError where the run was given its end before.
        """
        if self._forks is not None:
            raise ValueError("the run has ended: a fork of it ends with write_branch")
        try:
            if not self.failed:
                with self._transaction() as connection:
                    connection.execute(ENDING.insert, (1, *ENDING.kept(end)))
        finally:
            self.close()

    def write_branch(self, branch: Branch) -> None:
        """Commit a fork that has ended; others may go on.

        Raises ResourceError; ValueError for a node or step that is none, and where no fork was begun (`reopen`).
        """
        if self.failed:
            return
        if self._forks is None or branch.end.node not in self._nodes or branch.step < 0:
            raise ValueError(f"no fork of this run: step {branch.step}, last node {branch.end.node}")
        with self._transaction() as connection:
            self._insert_branch(connection, branch)
            _insert(connection, branch_setting_rows(self._branches + 2, self._forks))
        self._branches += 1
        self._settled = self.next_node

    def close(self) -> None:
        """Close the database and let others write; without an end the run or the fork reads as interrupted."""
        if not self.failed:
            with suppress(sqlite3.Error):  # closed already, or a reader holds the log: it stays, readable
                if self._settled == self.next_node:  # no fork is left to which they could belong
                    self._drop_settings(self._branches + 1)
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_up(self, trace: Trace, settings: tuple[Setting, ...]) -> None:
        """Go on where the folder was left: `trace` is what is in it."""
        self._nodes.update(step.node for step in trace.steps)
        with self._transaction() as connection:
            build(connection, known=_one(connection, "PRAGMA user_version"))
            self._last = max(self._highest(column) for column in _NODE_COLUMNS)
            self._blocks, self._sites = self._highest("tensor.block"), self._highest("site.id") + 1
            self._highest("sampler_filter.id")
            self._filters = {
                (name, text): number for number, name, text in connection.execute("SELECT * FROM sampler_filter")
            }
            if _one(connection, "SELECT count(*) FROM ending") == 0 and trace.end:
                connection.execute(ENDING.insert, (1, *ENDING.kept(trace.end)))
            self._branches = self._highest("branch.id")
            for branch in trace.branches[_one(connection, "SELECT count(*) FROM branch") :]:
                self._insert_branch(connection, branch)
                self._branches += 1
            opening = self._highest("reopened.id") + 1
            connection.execute(REOPENED.insert, (opening, _now(), self.next_node))
            self._drop_settings(self._branches + 1)
            _insert(connection, branch_setting_rows(self._branches + 1, settings))
        self._forks, self._settled = settings, self.next_node

    def _highest(self, column: str) -> int:
        """The highest number in a column (0 where there is none), if numbers are what it holds."""
        table, _, name = column.partition(".")
        found = _one(self._connection, f"SELECT max({name}) FROM {table}")
        if found is not None and (type(found) is not int or found > _MOST):
            raise InputError("trace.damaged", path=self.folder, reason=column)
        return max(found or 0, 0)

    def _insert_branch(self, connection: sqlite3.Connection, branch: Branch) -> None:
        number = self._branches + 1
        self._drop_settings(number)
        _insert(connection, branch_rows(number, self.next_node, branch))

    def _drop_settings(self, first: int) -> None:
        """Those of forks from number `first` on, which have not ended."""
        self._connection.execute("DELETE FROM branch_setting WHERE branch_id >= ?", (first,))

    def _new_filters(self, stages: tuple[Stage, ...]) -> dict[FilterKey, int]:
        fresh = [key for key in dict.fromkeys(map(filter_key, stages)) if key not in self._filters]
        return {key: number for number, key in enumerate(fresh, max(self._filters.values(), default=0) + 1)}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; a fault of the disk is told once."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except sqlite3.DatabaseError as fault:
            # The plain one is that of a damaged file; others would be mistakes of ours.
            if type(fault) not in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise
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
        if is_full(fault):
            return ResourceError("trace.disk_full", path=self.folder, steps=steps)
        return ResourceError("trace.cannot_write", path=self.folder, steps=steps, reason=fault)


def _insert(connection: sqlite3.Connection, rows: Rows) -> None:
    for table, values in rows.items():
        if values:
            connection.executemany(table.insert, values)


def _one(connection: sqlite3.Connection, question: str) -> Any:
    """The only value of the answer."""
    return connection.execute(question).fetchone()[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
