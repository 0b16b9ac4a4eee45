"""Our own corner of the disk: where it is, and the note of origin kept beside each fetched model."""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decodescope.models.layout import is_complete
from decodescope.models.records import ModelFiles


def cache_root() -> Path:
    """`$DECODESCOPE_CACHE`, else `decodescope` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("DECODESCOPE_CACHE"):
        return Path(own).expanduser()
    return user_cache() / "decodescope"


def user_cache() -> Path:
    """The folder in which programs keep what can be fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


@dataclass(frozen=True, slots=True)
class Origin:
    """The note beside a fetched model. It is written last, so a folder with a note is complete."""

    source: str
    requested: str  # the branch or tag that was asked for
    revision: str | None
    sha256: str | None
    bytes: int


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.origin.json")


def write_origin(path: Path, origin: Origin) -> None:
    """Keep the note of origin of the model at `path`."""
    write_json(_note(path), asdict(origin))


def read_origin(path: Path) -> Origin | None:
    """The note beside the model at `path`; None where there is none that can be read."""
    try:
        return Origin(**read_json(_note(path)))
    except TypeError:
        return None


def from_cache(name: str, path: Path, origin: Origin, tried: tuple[str, ...] = ()) -> ModelFiles:
    """A model that was fetched earlier, under its original source."""
    revision, sha256 = origin.revision, origin.sha256
    return ModelFiles(name, path, origin.source, revision, sha256, origin.bytes, tried, cached=True)


def repository_folder(kind: str, repository: str) -> Path:
    """Where the revisions of a repository lie: `hub/org--name` in the cache."""
    return cache_root() / kind / repository.replace("/", "--")


def cached_snapshot(name: str, folder: Path, requested: str) -> ModelFiles | None:
    """The newest complete revision below `folder` that was fetched as `requested` (or is that commit)."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        origin = read_origin(path) if path.is_dir() else None
        if origin and requested in (origin.requested, origin.revision) and is_complete(path):
            found.append((path.stat().st_mtime_ns, path, origin))
    return from_cache(name, *max(found)[1:]) if found else None


def read_json(path: Path) -> dict[str, Any]:
    """The object stored at `path`; empty when it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` in one step, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
