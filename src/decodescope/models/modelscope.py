"""ModelScope over its REST routes, and its library's own cache folder."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from decodescope.models.cache import user_cache
from decodescope.models.hashes import affordable_sha256
from decodescope.models.layout import is_complete, size_of
from decodescope.models.network import PATIENT, Patience, look_up
from decodescope.models.records import DEFAULT_REVISION, Listing, ModelFiles, RemoteFile, Report, SourceFault


def endpoint() -> str:
    """The address asked: `MODELSCOPE_ENDPOINT` where set."""
    address = os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn"
    return (address if "://" in address else f"https://{address}").rstrip("/")


def _host() -> str:
    return endpoint().partition("://")[2]


def listing(repository: str, revision: str, patience: Patience = PATIENT) -> Listing:
    """The files of one revision, with their hashes.

    Raises SourceFault when ModelScope cannot be reached or does not give the repository.
    """
    data = look_up(_host(), lambda: _ask(repository, revision, patience), patience)
    try:
        blobs = [file for file in data["Files"] or () if file["Type"] != "tree"]
        if not blobs:  # an unknown revision is answered with an empty list
            raise SourceFault("pull.no_revision", host=_host(), repository=repository, revision=revision)
        files = tuple(_remote(repository, revision, file) for file in blobs)
        return Listing(repository, "modelscope", _commit(data, blobs) or revision, files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceFault("pull.bad_listing", host=_host(), repository=repository) from error


def _ask(repository: str, revision: str, patience: Patience) -> dict[str, Any]:
    url = f"{endpoint()}/api/v1/models/{quote(repository)}/repo/files"
    query = {"Revision": revision, "Recursive": "true"}
    answer = httpx2.get(url, params=query, timeout=patience.connect_s, follow_redirects=True)
    if answer.status_code in (401, 403, 404):
        raise SourceFault("pull.no_repository", host=_host(), repository=repository)
    if answer.status_code != 200:
        raise SourceFault("pull.status", host=_host(), name=repository, status=answer.status_code)
    try:
        data = answer.json()["Data"]
    except (ValueError, TypeError, KeyError) as error:
        raise SourceFault("pull.bad_listing", host=_host(), repository=repository) from error
    if not isinstance(data, dict):  # refusals come with status 200 and no data
        raise SourceFault("pull.no_repository", host=_host(), repository=repository)
    return data


def _commit(data: dict[str, Any], blobs: list[dict[str, Any]]) -> str | None:
    """The full commit: the listing may give only its start, beside the commit that last changed each file."""
    latest = data.get("LatestCommitter") or {}
    short = str(latest.get("ShortId") or "")
    changed = [str(file.get("Revision")) for file in blobs]
    commits = (commit for commit in changed if short and commit.startswith(short))
    found = str(latest.get("Id") or next(commits, short))
    return found if re.fullmatch(r"[0-9a-f]{7,64}", found) else None


def _remote(repository: str, revision: str, file: dict[str, Any]) -> RemoteFile:
    path = str(file["Path"])
    query = f"Revision={quote(revision, safe='')}&FilePath={quote(path)}"
    url = f"{endpoint()}/api/v1/models/{quote(repository)}/repo?{query}"
    return RemoteFile(path, url, int(file["Size"]), sha256=file.get("Sha256") or None)


def in_user_cache(name: str, repository: str, revision: str, report: Report) -> ModelFiles | None:
    """The model in the cache of ModelScope's own library, whose layout changed with its versions.

    That cache does not say which revision it holds, so it answers only for the default one.
    """
    if revision != DEFAULT_REVISION["modelscope"]:
        return None
    root = Path(os.environ.get("MODELSCOPE_CACHE") or user_cache() / "modelscope").expanduser()
    for place in ("hub/models", "models", "hub", "."):
        for spelling in (repository, repository.replace(".", "___")):
            folder = root / place / spelling
            if is_complete(folder):
                size = size_of(folder)
                sha256 = affordable_sha256(folder, size, report)
                return ModelFiles(name, folder, "modelscope", None, sha256, size, cached=True)
    return None
