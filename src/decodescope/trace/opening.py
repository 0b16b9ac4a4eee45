"""Opening a run folder for reading, without writing to it and without trusting it."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from decodescope.errors import InputError
from decodescope.trace.reading import RowReader
from decodescope.trace.schema import APPLICATION_ID, DATABASE, FORMAT, is_ours

_LOG = DATABASE + "-wal"
# Primary result codes of a machine that does not let us read, as against a file that makes no sense.
_REFUSED = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}  # fmt: skip


@contextmanager
def opened(folder: Path) -> Iterator[RowReader]:
    """One consistent view of a run's database. Raises InputError for everything that is not a sound run."""
    database = folder / DATABASE
    with ExitStack() as stack:
        try:
            _check_there(folder)
            connection = _snapshot(stack, database)
            size = sum(file.stat().st_size for file in (database, folder / _LOG) if file.exists())
            # No value is longer than the file it comes from (nor our own statements than a page).
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(size, 4096), 10**9))
            _check_ours(connection, folder)
            yield RowReader(connection, folder, size)
        except (sqlite3.Error, UnicodeDecodeError) as fault:
            raise _refusal(folder, fault) from fault
        except OSError as fault:
            raise InputError("trace.cannot_read", path=folder, reason=fault.strerror or fault) from fault


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError("trace.not_a_folder" if folder.exists() else "trace.missing", path=folder)
    if not (folder / DATABASE).is_file():
        raise InputError("trace.no_database", path=folder)


def _snapshot(stack: ExitStack, database: Path) -> sqlite3.Connection:
    """A read transaction on the file itself, or on a copy where the place does not allow reading it.

    A log left by a killed process needs an index beside it: on read-only media only a copy can have one.
    """
    try:
        return _begin(stack, database)
    except sqlite3.OperationalError as fault:
        if _primary(fault) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    scratch = Path(stack.enter_context(TemporaryDirectory(prefix="decodescope-")))
    for file in (database, database.with_name(_LOG)):
        if file.exists():
            shutil.copyfile(file, scratch / file.name)
    return _begin(stack, scratch / DATABASE)


def _begin(stack: ExitStack, database: Path) -> sqlite3.Connection:
    uri = f"{database.absolute().as_uri()}?mode=ro"
    connection = stack.enter_context(closing(sqlite3.connect(uri, uri=True, isolation_level=None)))
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("BEGIN")
    connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    return connection


def _check_ours(connection: sqlite3.Connection, folder: Path) -> None:
    application, version = (
        connection.execute(f"PRAGMA {mark}").fetchone()[0] for mark in ("application_id", "user_version")
    )
    if application == 0 and connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is None:
        raise InputError("trace.empty", path=folder)
    if application != APPLICATION_ID:
        raise InputError("trace.foreign", path=folder)
    if version > FORMAT:
        raise InputError("trace.newer", path=folder, version=version, known=FORMAT)
    if version < 1 or not is_ours(connection, version):
        raise InputError("trace.damaged", path=folder, reason="sqlite_schema")


def _refusal(folder: Path, fault: Exception) -> InputError:
    code = _primary(fault)
    if code == sqlite3.SQLITE_NOTADB:
        return InputError("trace.foreign", path=folder)
    key = "trace.cannot_read" if code in _REFUSED else "trace.damaged"
    # SQLite quotes from the file: nothing of it may act on a terminal.
    return InputError(key, path=folder, reason=ascii(str(fault))[1:-1])


def _primary(fault: Exception) -> int:
    """The lowest byte of SQLite's result code; 0 for a fault found by Python's own module."""
    return int(getattr(fault, "sqlite_errorcode", 0)) & 0xFF
