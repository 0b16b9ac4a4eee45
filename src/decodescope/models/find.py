"""From what the user types after `-m` to files on this machine."""

import re

from decodescope.errors import InputError
from decodescope.models import ollama
from decodescope.models.cache import cached_snapshot, repository_folder
from decodescope.models.local import existing, from_path, looks_like_path
from decodescope.models.records import DEFAULT_REVISION, ModelFiles, Report, SourceFault, silent
from decodescope.models.starter import STARTERS, Starter, cached_starter

# What speaks HTTP is imported where it is needed: a model that is already here starts without it.

_REPOSITORY = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)


def find_model(spec: str, report: Report = silent, *, download: bool = True) -> ModelFiles:
    """The files of the model that `spec` names, fetched when `download` is allowed and they are not here yet.

    `spec` is an existing folder or `.gguf` file, `starter`, `starter-small`, a hub id `org/name[@revision]`,
    `ms:org/name[@revision]` (ModelScope) or `ollama:name[:tag]`. Raises InputError with one sentence for each
    source that was tried and the way to hand over a local file.
    """
    try:
        return _find(spec, report, download)
    except OSError as error:
        raise InputError("pull.cannot_read", path=error.filename or spec, reason=error.strerror) from None


def _find(spec: str, report: Report, download: bool) -> ModelFiles:
    if spec in STARTERS:
        return find_starter(STARTERS[spec], report, download=download)
    if path := existing(spec):
        return from_path(spec, path, report)
    kind, _, rest = spec.partition(":")
    if kind == "ollama":
        return ollama.find(rest, report)
    if kind == "ms" and (match := _REPOSITORY.fullmatch(rest)):
        return _from_repository(spec, "modelscope", match, report, download)
    if looks_like_path(spec):
        raise InputError("pull.no_path", path=spec)
    if match := _REPOSITORY.fullmatch(spec):
        return _from_repository(spec, "hub", match, report, download)
    raise InputError("pull.unknown", name=spec)


def find_starter(starter: Starter, report: Report = silent, *, download: bool = True) -> ModelFiles:
    """A starter model from the cache or the first source that gives it.

    Raises InputError as `find_model` does.
    """
    tried: tuple[str, ...] = ()
    try:
        if found := cached_starter(starter, report):
            return found
    except SourceFault as fault:
        if not download:
            raise
        tried = (str(fault),)
    if not download:
        raise InputError("pull.not_here", name=starter.name, path=starter.path)
    from decodescope.models.starter_sources import fetch_starter

    return fetch_starter(starter, tried, report)


def _from_repository(spec: str, kind: str, match: re.Match[str], report: Report, download: bool) -> ModelFiles:
    repository, revision = match["id"], match["revision"] or DEFAULT_REVISION[kind]
    folder = repository_folder(kind, repository)
    if found := cached_snapshot(spec, folder, revision):
        return found
    from decodescope.models import hub, modelscope
    from decodescope.models.snapshot import fetch_snapshot

    on_hub = kind == "hub"
    in_user_cache = hub.in_user_cache if on_hub else modelscope.in_user_cache
    if found := in_user_cache(spec, repository, revision, report):
        return found
    if not download:
        raise InputError("pull.not_here", name=spec, path=folder)
    try:
        listing = (hub.listing if on_hub else modelscope.listing)(repository, revision)
        return fetch_snapshot(spec, listing, folder, revision, report)
    except SourceFault as fault:
        raise InputError(f"pull.{kind}_nowhere", name=spec, sentences=str(fault)) from None
