"""One file from a server: resumed, checked, and given its name only when it is what it should be."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
from filelock import FileLock

from decodescope.errors import InputError
from decodescope.locale import translate
from decodescope.models.hashes import CHUNK_BYTES, remember, remembered, sha256_of
from decodescope.models.network import PATIENT, Patience, reason
from decodescope.models.records import RemoteFile, Report, SourceFault

Headers = dict[str, str]


def download(
    remote: RemoteFile, target: Path, headers: Headers, report: Report, patience: Patience = PATIENT
) -> str:
    """Fetch `remote` to `target` and return its SHA-256; a file already there that agrees is kept.

    An interrupted transfer stays in `target.part` and is resumed, now or at the next start. Raises
    SourceFault when the server cannot be reached, breaks off too often or sends something else;
    InputError when the disk is too small or not writable.
    """
    with writing(target), exclusive(target):
        if agrees(target, remote):
            return sha256_of(target, report)
        with Partial(part_of(target), remote) as partial:
            check_space(target.parent, remote.bytes - partial.size)
            _receive(partial, headers, report, patience)
            return partial.finish(target)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write near `path` into InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError("pull.cannot_write", path=error.filename or path, reason=error.strerror) from None


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """One process at a time for one target; the others wait and then find the work done."""
    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def part_of(target: Path) -> Path:
    """Where the unfinished file lies."""
    return target.with_name(f"{target.name}.part")


def check_space(folder: Path, need: int) -> None:
    """Raise InputError with both numbers when the disk of `folder` has fewer than `need` free bytes."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError("pull.disk", folder=folder, need=need, free=free)


def agrees(path: Path, remote: RemoteFile) -> bool:
    """Whether the file at `path` is what the server lists."""
    if not path.exists():
        return False
    if path.stat().st_size != remote.bytes:
        return False
    if remote.sha256:
        return sha256_of(path) == remote.sha256
    if remote.git_blob:
        return _git_blob(remote.bytes, path.read_bytes()).hexdigest() == remote.git_blob
    return remembered(path) is not None  # nothing to check against: trust only what we fetched ourselves


def _git_blob(size: int, content: bytes = b"") -> "hashlib._Hash":
    return hashlib.sha1(b"blob %d\0%b" % (size, content), usedforsecurity=False)


class Partial:
    """The unfinished file, with the digests of what it holds so far."""

    def __init__(self, path: Path, remote: RemoteFile) -> None:
        self.path, self.remote = path, remote
        self._file = path.open("a+b")
        self._forget()
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            self._count(chunk)
        if self.size > remote.bytes:
            self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()

    def _forget(self) -> None:
        self.size, self._sha256, self._blob = 0, hashlib.sha256(), _git_blob(self.remote.bytes)

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self._sha256.update(chunk)
        self._blob.update(chunk)

    def clear(self) -> None:
        """Begin again."""
        self._file.truncate(0)
        self._forget()

    def append(self, chunk: bytes) -> None:
        """Write the next bytes. Raises SourceFault as soon as there are more than there should be."""
        if self.size + len(chunk) > self.remote.bytes:
            self.clear()
            raise SourceFault("pull.too_long", name=self.remote.name, bytes=self.remote.bytes)
        self._file.write(chunk)
        self._count(chunk)

    def finish(self, target: Path) -> str:
        """Rename to `target` if the digest agrees and return the SHA-256.

        Raises SourceFault naming the expected and the found digest; the file is then deleted.
        """
        sha256 = self._sha256.hexdigest()
        expected = self.remote.sha256 or self.remote.git_blob
        found = sha256 if self.remote.sha256 else self._blob.hexdigest()
        if expected not in (None, found):
            self.path.unlink()
            raise SourceFault("pull.mismatch", name=self.remote.name, expected=expected, found=found)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.path.replace(target)
        remember(target, sha256)
        return sha256


def _receive(partial: Partial, headers: Headers, report: Report, patience: Patience) -> None:
    failures, started = 0, False
    with httpx2.Client(timeout=patience.timeout(), follow_redirects=True, headers=headers) as client:
        while partial.size < partial.remote.bytes:
            before = partial.size
            try:
                _take(client, partial, report)
                problem = translate("pull.reason.broken")
            except httpx2.RequestError as error:
                problem = reason(error)
                if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and not started:
                    raise SourceFault("pull.unreachable", host=_host(partial), reason=problem) from None
            started = True
            failures = 0 if partial.size - before >= patience.gain_bytes else failures + 1
            if partial.size < partial.remote.bytes:
                if failures >= patience.attempts:
                    raise _gave_up(partial, problem)
                time.sleep(patience.pause_s)


def _host(partial: Partial) -> str:
    return httpx2.URL(partial.remote.url).host


def _gave_up(partial: Partial, problem: str) -> SourceFault:
    remote = partial.remote
    values = {"name": remote.name, "host": _host(partial), "have": partial.size, "bytes": remote.bytes}
    return SourceFault("pull.broken_off", reason=problem, **values)


def _take(client: httpx2.Client, partial: Partial, report: Report) -> None:
    """One request: append what comes. Returns early where trying again may help."""
    remote, text = partial.remote, translate("pull.fetching", file=partial.remote.name, host=_host(partial))
    headers = {"Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
    with client.stream("GET", remote.url, headers=headers) as response:
        if not _continues(response, partial):
            return
        report(text, (partial.size, remote.bytes))
        for chunk in response.iter_bytes():
            partial.append(chunk)
            report(text, (partial.size, remote.bytes))


def _continues(response: httpx2.Response, partial: Partial) -> bool:
    """Whether the body goes on where `partial` ends (made empty when the server starts at the beginning)."""
    status = response.status_code
    if status == 206 and _range_start(response) == partial.size:
        return True
    if status in (200, 206, 416):
        partial.clear()
        return status == 200
    if status == 429 or status >= 500:
        return False
    raise SourceFault("pull.status", name=partial.remote.name, host=_host(partial), status=status)


def _range_start(response: httpx2.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None
