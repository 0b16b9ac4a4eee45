"""Models that the user hands over by path: a folder in Hugging Face layout, or one GGUF file."""

from pathlib import Path

from decodescope.errors import InputError
from decodescope.formats.gguf import is_gguf
from decodescope.models.hashes import affordable_sha256
from decodescope.models.layout import CONFIG, size_of
from decodescope.models.records import ModelFiles, Report


def existing(spec: str) -> Path | None:
    """The path that `spec` names, if there is something there."""
    try:
        path = Path(spec).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null character
        return None


def looks_like_path(spec: str) -> bool:
    """Whether the user most likely meant a path: hub ids have one slash and end otherwise."""
    return spec.startswith(("/", ".", "~")) or spec.endswith(".gguf") or spec.count("/") > 1 or "\\" in spec


def from_path(spec: str, path: Path, report: Report) -> ModelFiles:
    """The model at an existing path; hashed when that is quick.

    Raises InputError for a folder without a configuration or a file that is no GGUF, OSError for what cannot
    be read.
    """
    if path.is_dir():
        _check_folder(path)
        source, size = "folder", size_of(path)
    elif path.is_file() and is_gguf(path):
        source, size = "file", path.stat().st_size
    else:
        raise InputError("pull.not_gguf", path=path)
    return ModelFiles(spec, path, source, None, affordable_sha256(path, size, report), size)


def _check_folder(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise InputError("pull.empty_folder", path=path)
    if CONFIG in names:
        return
    if gguf := [name for name in names if name.endswith(".gguf")]:
        raise InputError("pull.folder_of_gguf", path=path, files=", ".join(gguf[:5]))
    raise InputError("pull.no_config", path=path)
