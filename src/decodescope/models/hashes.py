"""SHA-256 of files and folders, remembered by path, size and modification time."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from decodescope.locale import translate
from decodescope.models.cache import cache_root, read_json, write_json
from decodescope.models.layout import model_files
from decodescope.models.records import ModelFiles, Report, silent

CHUNK_BYTES = 1 << 20
PLAIN_LIMIT_BYTES = 2 << 30  # above this a plain find does not spend the seconds: see hash_model


def hash_model(files: ModelFiles, report: Report = silent) -> ModelFiles:
    """The same model with its `sha256` computed, however big it is."""
    return replace(files, sha256=sha256_of_model(files.path, report))


def sha256_of_model(path: Path, report: Report = silent) -> str:
    """The hash of a file, or of a folder: over the sorted lines "sha256  name\\n" of its model files."""
    if not path.is_dir():
        return sha256_of(path, report)
    return combined((sha256_of(path / name, report), name) for name in model_files(path))


def combined(hashes: Iterable[tuple[str, str]]) -> str:
    """One hash for many (sha256, name) pairs."""
    lines = sorted(f"{sha256}  {name}\n" for sha256, name in hashes)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def affordable_sha256(path: Path, size: int, report: Report = silent) -> str | None:
    """The hash where it is remembered or the model is under 2 GiB; None where it would take long."""
    if size <= PLAIN_LIMIT_BYTES or all(remembered(file) for file in _parts(path)):
        return sha256_of_model(path, report)
    return None


def _parts(path: Path) -> list[Path]:
    return [path / name for name in model_files(path)] if path.is_dir() else [path]


def sha256_of(path: Path, report: Report = silent) -> str:
    """SHA-256 of a file, read once for as long as its size and modification time stay the same."""
    if known := remembered(path):
        return known
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    text = translate("pull.hashing", file=path.name)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(text, (done, size))
    remember(path, digest.hexdigest())
    return digest.hexdigest()


def _ledger() -> Path:
    return cache_root() / "hashes.json"


def _signature(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def remembered(path: Path) -> str | None:
    """The hash computed earlier, if the file has not changed since."""
    entry = read_json(_ledger()).get(str(path.resolve()))
    if isinstance(entry, dict) and isinstance(entry.get("sha256"), str):
        return entry["sha256"] if entry == {**_signature(path), "sha256": entry["sha256"]} else None
    return None


def remember(path: Path, sha256: str) -> None:
    """Keep a hash for later; forget those of files that are gone. An unwritable cache only costs time."""
    with suppress(OSError):
        known = {name: entry for name, entry in read_json(_ledger()).items() if Path(name).exists()}
        known[str(path.resolve())] = {**_signature(path), "sha256": sha256}
        write_json(_ledger(), known)
