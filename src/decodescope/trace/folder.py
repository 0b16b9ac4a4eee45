"""A run folder taken for writing: a new one claimed, an old one opened again, one process at a time."""

import errno
import os
import sqlite3
import sys
from contextlib import ExitStack
from pathlib import Path
from weakref import finalize

from decodescope.errors import InputError, ResourceError
from decodescope.trace.opening import opened
from decodescope.trace.schema import DATABASE
from decodescope.trace.tensors import TENSORS

if sys.platform != "win32":
    import fcntl

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# SQLite says FULL for ENOSPC alone; a quota or a file size limit is a refused write to it.
_FULL_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
_READY = (
    "PRAGMA trusted_schema = OFF", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL",
    "BEGIN IMMEDIATE", "ROLLBACK",
)  # fmt: skip


class FolderLock:
    """An advisory lock on a folder, held until `release` or the end of the process, however that ends.

    Where there are no locks (Windows, some network file systems) nothing is locked. Raises InputError where
    another writer holds it.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = _locked(folder)
        self._finalizer = None if descriptor is None else finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()


def _locked(folder: Path) -> int | None:
    """A descriptor of the folder that holds its lock; None where none can be had."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # whoever opens its database next says what is wrong
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        os.close(descriptor)
        if isinstance(fault, BlockingIOError):
            raise InputError("trace.still_written", path=folder) from None
        return None
    return descriptor


def refuse_used(folder: Path) -> None:
    """Raise InputError where a run folder could not be made because something is there already."""
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError("trace.not_empty", path=folder)


def claim(folder: Path) -> FolderLock:
    """Take an empty or absent folder for a new run: locked, with an empty database in it.

    Raises InputError where it is in use, is a file, or cannot be written; ResourceError when the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_used(folder)
        lock = FolderLock(folder)
        try:
            os.close(os.open(folder / DATABASE, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        except BaseException:
            lock.release()
            raise
    except (FileExistsError, NotADirectoryError) as fault:
        file = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        raise InputError("trace.is_file", path=file) from fault
    except OSError as fault:
        raise _refusal("trace.cannot_create", folder, fault) from fault
    return lock


def discard(folder: Path) -> None:
    """Leave a folder as empty as `claim` found it."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)


def refuse_unfit(folder: Path) -> None:
    """Raise InputError for a run that is not to be written to: something in it would act, or lies elsewhere."""
    for path in (folder / DATABASE, folder / TENSORS):
        if path.is_symlink():
            raise InputError("trace.link", path=path)
    with opened(folder) as reader:
        if reader.acts():
            raise InputError("trace.acts", path=folder)


def opened_to_write(folder: Path, refusal: str) -> sqlite3.Connection:
    """A connection to the database of a folder that is known to be allowed to write.

    Raises InputError with the key `refusal` where it is not; ResourceError when the disk is full.
    """
    uri = f"{(folder / DATABASE).absolute().as_uri()}?mode=rw"
    with ExitStack() as undo:
        try:
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            undo.callback(connection.close)
            for statement in _READY:
                connection.execute(statement)
        except sqlite3.OperationalError as fault:
            raise _refusal(refusal, folder, fault) from fault
        undo.pop_all()
    return connection


def _refusal(key: str, folder: Path, fault: Exception) -> InputError | ResourceError:
    if is_full(fault):
        return ResourceError("trace.disk_full", path=folder, steps=0)
    reason = getattr(fault, "strerror", None) or fault
    return InputError(key, path=folder, reason=reason)


def is_full(fault: Exception) -> bool:
    """Whether a fault of the disk means that there is no room left on it."""
    code = getattr(fault, "sqlite_errorcode", None)
    return code in _FULL_SQLITE or getattr(fault, "errno", None) in _FULL
