"""The C kernels, compiled on first use by the machine's own compiler into our corner of the disk.

A library is found by what it was made from: sources, compiler, flags, processor. It is written under another name
and renamed: processes that start at once may each build it, and none sees half of it. Only files that nobody else
can change are loaded.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decodescope.models.cache import cache_root

Reason = Literal["platform", "no_compiler", "compile_failed", "cache_unwritable", "cache_unsafe", "load_failed"]

SOURCE = Path(__file__).with_name("products.c")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
COMPILERS = ("cc", "gcc", "clang")
# No contraction: unpacked values are rounded as their definition says; the sums ask for fused steps themselves.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
_SYSTEMS = ("Linux", "Darwin")
_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Built:
    """The library, or why there is none; `detail` is what compiler or system said."""

    path: Path | None = None
    reason: Reason | None = None
    detail: str = ""


def build(flags: tuple[str, ...] = FLAGS) -> Built:
    """The compiled kernels for this machine, from the cache where they lie there already. Never raises."""
    if platform.system() not in _SYSTEMS:
        return Built(reason="platform", detail=platform.system())
    compiler = _compiler()
    if compiler is None:
        return Built(reason="no_compiler")
    try:
        folder = _own_folder(cache_root() / "kernels")
        if folder is None:
            return Built(reason="cache_unsafe", detail=str(cache_root() / "kernels"))
        library = folder / f"products-{_key(compiler, flags)}.so"
        return _from_cache(library) or _compile(compiler, flags, library)
    except OSError as error:
        return Built(reason="cache_unwritable", detail=str(error))


def is_built(flags: tuple[str, ...] = FLAGS) -> bool:
    """Whether `build` will find its answer at once."""
    compiler = _compiler()
    if compiler is None or platform.system() not in _SYSTEMS:
        return True
    library = cache_root() / "kernels" / f"products-{_key(compiler, flags)}.so"
    return library.exists() or library.with_suffix(".failed").exists()


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _own_folder(folder: Path) -> Path | None:
    """The folder, made if need be; None where anyone but us can write into it or swap it for another."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    above = folder.parent.stat()
    swappable = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    return folder if _is_ours(folder, stat.S_IFDIR) and not swappable else None


def _is_ours(path: Path, kind: int) -> bool:
    """A folder or plain file (no link) that we own and nobody else may write."""
    found = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & others


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """What decides about the machine code. A compiler is known by its file: asking it would take a process."""
    binary = Path(compiler).resolve()
    made_by = binary.stat()
    parts = [file.read_bytes() for file in (SOURCE, *HEADERS)]
    parts += [f"{binary} {made_by.st_size} {made_by.st_mtime_ns}".encode(), " ".join(flags).encode()]
    parts.append(_processor().encode())
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor() -> str:
    """Architecture and instruction sets."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    return " ".join((platform.machine(), *sorted(flags)))


def _from_cache(library: Path) -> Built | None:
    """A library that lies there, or the note that it could not be made, so that not every start tries again."""
    if library.exists():
        if not _is_ours(library, stat.S_IFREG):
            return Built(reason="cache_unsafe", detail=str(library))
        return Built(library)
    note = library.with_suffix(".failed")
    return Built(reason="compile_failed", detail=note.read_text(encoding="utf-8")) if note.exists() else None


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> Built:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as folder:
        made = Path(folder) / library.name
        command = [compiler, *flags, "-o", str(made), str(SOURCE)]
        try:
            run = subprocess.run(command, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Built(reason="compile_failed", detail=str(error)[:400])
        if run.returncode or not made.is_file():
            said = run.stderr.decode(errors="replace")[-400:]
            note = Path(folder) / "note"
            note.write_text(said, encoding="utf-8")
            note.replace(library.with_suffix(".failed"))
            return Built(reason="compile_failed", detail=said)
        made.chmod(0o700)
        made.replace(library)
    return Built(library)
