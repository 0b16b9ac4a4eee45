"""Models that Ollama keeps on this machine: a manifest names a blob, the blob is a GGUF file."""

import os
import re
from pathlib import Path

from decodescope.errors import InputError
from decodescope.models.cache import read_json
from decodescope.models.hashes import sha256_of
from decodescope.models.records import ModelFiles, Report

MODEL_LAYER = "application/vnd.ollama.image.model"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def folders() -> list[Path]:
    """Where Ollama keeps models: `$OLLAMA_MODELS`, the user's folder, the system service's folder."""
    named = os.environ.get("OLLAMA_MODELS")
    places = ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    return [Path(place).expanduser() for place in ([named] if named else places)]


def find(spec: str, report: Report) -> ModelFiles:
    """The blob behind `name[:tag]`, `user/name[:tag]` or `host/user/name[:tag]`, its digest checked.

    Raises InputError for a name that is none, an unknown model, a manifest without a model, or a blob that is
    missing or does not have its digest.
    """
    name, _, tag = spec.partition(":")
    manifest = _manifest_path(spec, name.split("/"), tag or "latest")
    for root in folders():
        if (root / manifest).is_file():
            return _from_manifest(spec, root, root / manifest, tag or "latest", report)
    raise InputError("pull.ollama_unknown", name=spec, folders=", ".join(map(str, folders())))


def _manifest_path(spec: str, parts: list[str], tag: str) -> Path:
    if len(parts) > 3 or not all(_PART.fullmatch(part) for part in (*parts, tag)):
        raise InputError("pull.ollama_name", name=spec)
    return Path("manifests", *("registry.ollama.ai", "library")[: 3 - len(parts)], *parts, tag)


def _from_manifest(spec: str, root: Path, manifest: Path, tag: str, report: Report) -> ModelFiles:
    layers = read_json(manifest).get("layers")
    layers = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    digests = [str(layer.get("digest")) for layer in layers if layer.get("mediaType") == MODEL_LAYER]
    if len(digests) != 1 or not re.fullmatch("sha256:[0-9a-f]{64}", digests[0]):
        raise InputError("pull.ollama_manifest", path=manifest)
    expected = digests[0].removeprefix("sha256:")
    blob = root / "blobs" / f"sha256-{expected}"
    if not blob.is_file():
        raise InputError("pull.ollama_blob", name=spec, path=blob)
    found = sha256_of(blob, report)
    if found != expected:
        raise InputError("pull.mismatch", name=blob, expected=expected, found=found)
    return ModelFiles(f"ollama:{spec}", blob, "ollama", tag, found, blob.stat().st_size, cached=True)
