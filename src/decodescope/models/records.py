"""What this room hands out and what its parts tell each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from decodescope.errors import InputError
from decodescope.locale import translate


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that lies on this machine, and where it came from.

    `path` is a folder in Hugging Face layout or one GGUF file. `sha256` is that of the single file; for a
    folder it is the SHA-256 of the sorted lines "sha256  name\\n" of its model files; None: not computed.
    `tried` holds a sentence for each source that failed before this one.
    """

    name: str  # what the user asked for
    path: Path
    source: str  # folder, file, cache (put there by hand), hub, mirror, modelscope, ollama, wheels
    revision: str | None
    sha256: str | None
    bytes: int
    tried: tuple[str, ...] = ()
    cached: bool = False  # it was already here: nothing was fetched this time


class Report(Protocol):
    """Told what is being done: a line of text, and for transfers (done, total) in bytes."""

    def __call__(self, text: str, progress: tuple[int, int] | None = None, /) -> None: ...


def silent(text: str, progress: tuple[int, int] | None = None, /) -> None:
    """The report of those who do not want one."""


# The branch meant when the user names none.
DEFAULT_REVISION = {"hub": "main", "modelscope": "master"}


class SourceFault(InputError):
    """One source cannot give the model: the next one may."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that a server offers, and what it must turn out to be; `git_blob` is git's object id (SHA-1)."""

    name: str
    url: str
    bytes: int
    sha256: str | None = None
    git_blob: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bytes, int) or self.bytes < 0:
            raise ValueError(f"{self.name}: {self.bytes!r} is no size")


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One piece of a file that lies cut into wheels: `member` inside the wheel of `package` at `version`."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class Listing:
    """One revision of a repository: its files, and the headers (a token) for fetching them."""

    repository: str
    source: str
    revision: str
    files: tuple[RemoteFile, ...]
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def describe(files: ModelFiles) -> str:
    """The line that says where a model came from, its revision, hash, size and place."""
    where = translate(f"pull.source.{files.source}")
    return translate(
        "pull.cached" if files.cached else "pull.origin",
        name=files.name,
        source=where,
        revision=files.revision or "-",
        sha256=files.sha256 or translate("pull.not_hashed"),
        bytes=files.bytes,
        path=files.path,
    )
