"""The Hugging Face hub, or the mirror that `HF_ENDPOINT` names."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from decodescope.models.hashes import affordable_sha256
from decodescope.models.layout import is_complete, size_of
from decodescope.models.network import PATIENT, Patience, look_up
from decodescope.models.records import Listing, ModelFiles, RemoteFile, Report, SourceFault


def endpoint() -> str:
    """The address asked: `HF_ENDPOINT` where set."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def source() -> str:
    """`hub`, or `mirror` when `HF_ENDPOINT` names another host."""
    return "hub" if _host().endswith("huggingface.co") else "mirror"


def _host() -> str:
    return endpoint().partition("://")[2] or endpoint()


def listing(repository: str, revision: str, patience: Patience = PATIENT) -> Listing:
    """The files of one revision, with their hashes.

    Raises SourceFault when the hub is switched off, cannot be reached, or does not give the repository.
    """
    if constants.is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    ):
        raise SourceFault("pull.hub_offline")
    info = look_up(_host(), lambda: _ask(repository, revision, patience), patience)
    try:
        files = tuple(_remote(repository, info.sha or revision, file) for file in info.siblings or ())
    except (TypeError, ValueError) as error:
        raise SourceFault("pull.bad_listing", host=_host(), repository=repository) from error
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return Listing(repository, source(), info.sha or revision, files, headers)


def _ask(repository: str, revision: str, patience: Patience) -> ModelInfo:
    api, seconds = HfApi(endpoint=endpoint()), patience.connect_s
    try:
        return api.model_info(repository, revision=revision, files_metadata=True, timeout=seconds)
    except OfflineModeIsEnabled:
        raise SourceFault("pull.hub_offline") from None
    except GatedRepoError:
        raise SourceFault("pull.gated", host=_host(), repository=repository) from None
    except RepositoryNotFoundError:
        raise SourceFault("pull.no_repository", host=_host(), repository=repository) from None
    except RevisionNotFoundError:
        raise SourceFault("pull.no_revision", host=_host(), repository=repository, revision=revision) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise SourceFault("pull.status", host=_host(), name=repository, status=status) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a page that is no such listing
        raise SourceFault("pull.bad_listing", host=_host(), repository=repository) from error


def _remote(repository: str, commit: str, file: RepoSibling) -> RemoteFile:
    url = hf_hub_url(repository, file.rfilename, revision=commit, endpoint=endpoint())
    if file.lfs:
        return RemoteFile(file.rfilename, url, file.lfs.size, sha256=file.lfs.sha256)
    if file.size is None:
        raise ValueError(f"no size for {file.rfilename}")
    return RemoteFile(file.rfilename, url, file.size, git_blob=file.blob_id)


def in_user_cache(name: str, repository: str, revision: str, report: Report) -> ModelFiles | None:
    """The model in the Hugging Face library's own cache, if every weight file is there."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (root / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = revision
    folder = root / "snapshots" / commit
    if not is_complete(folder):
        return None
    size = size_of(folder)
    return ModelFiles(name, folder, "hub", commit, affordable_sha256(folder, size, report), size, cached=True)
