"""A repository's model as a folder of the cache: chosen, fetched file by file, noted when complete."""

from pathlib import Path

from decodescope.models.cache import Origin, write_origin
from decodescope.models.download import check_space, download, part_of, writing
from decodescope.models.hashes import combined
from decodescope.models.layout import check_names, check_weights, choose
from decodescope.models.network import PATIENT, Patience
from decodescope.models.records import Listing, ModelFiles, RemoteFile, Report


def fetch_snapshot(
    name: str, listing: Listing, folder: Path, requested: str, report: Report, patience: Patience = PATIENT
) -> ModelFiles:
    """Fetch the model's files of one listed revision to `folder`/revision.

    Raises SourceFault for a listing that is no usable model or a transfer that fails, InputError when the
    disk is too small.
    """
    names = [file.name for file in listing.files]
    check_names(listing.repository, [*names, listing.revision])
    check_weights(listing.repository, names)
    wanted = set(choose(names))
    files = sorted((file for file in listing.files if file.name in wanted), key=lambda file: file.bytes)
    target = folder / listing.revision.replace("/", "--")
    with writing(target / "any"):
        check_space(target, sum(_missing(target, file) for file in files))
    hashes = _fetch_all(files, target, listing, report, patience)
    total = sum(file.bytes for file in files)
    origin = Origin(listing.source, requested, listing.revision, combined(hashes), total)
    with writing(target):
        write_origin(target, origin)
    return ModelFiles(name, target, origin.source, origin.revision, origin.sha256, total)


def _missing(target: Path, file: RemoteFile) -> int:
    part, whole = part_of(target / file.name), target / file.name
    have = whole.stat().st_size if whole.exists() else part.stat().st_size if part.exists() else 0
    return max(0, file.bytes - have)


def _fetch_all(
    files: list[RemoteFile], target: Path, listing: Listing, report: Report, patience: Patience
) -> list[tuple[str, str]]:
    total, done, hashes = sum(file.bytes for file in files), 0, []
    for file in files:
        shifted = _shifted(report, done, total)
        hashes.append((download(file, target / file.name, listing.headers, shifted, patience), file.name))
        done += file.bytes
    return hashes


def _shifted(report: Report, done: int, total: int) -> Report:
    """The same report, its progress counted over all files."""

    def progress_of_all(text: str, progress: tuple[int, int] | None = None, /) -> None:
        report(text, progress and (done + progress[0], total))

    return progress_of_all
