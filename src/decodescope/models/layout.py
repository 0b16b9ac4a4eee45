"""The Hugging Face layout: which files of a folder or repository make up a model."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from decodescope.models.records import SourceFault

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
COMPANIONS = frozenset(
    {
        CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model",
    }
)  # fmt: skip


def choose(names: Iterable[str]) -> list[str]:
    """The names that a model needs, sorted. Weights named `model*` win over others: some repositories hold a
    second copy under another name (`consolidated.safetensors`)."""
    names = list(names)
    weights = [name for name in names if name.endswith((".safetensors", INDEX_SUFFIX)) and "/" not in name]
    standard = [name for name in weights if name.startswith("model")]
    return sorted({*(standard or weights), *COMPANIONS.intersection(names)})


def model_files(folder: Path) -> list[str]:
    """The names of a folder's model files, sorted."""
    return choose(entry.name for entry in folder.iterdir() if entry.is_file())


def size_of(folder: Path) -> int:
    """Bytes of all model files of a folder."""
    return sum((folder / name).stat().st_size for name in model_files(folder))


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a configuration and every weight file that its index names."""
    if not (folder / CONFIG).is_file():
        return False
    names = model_files(folder)
    shards = {name for name in names if name.endswith(".safetensors")}
    for index in (name for name in names if name.endswith(INDEX_SUFFIX)):
        try:
            named = set(json.loads((folder / index).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if named - shards:
            return False
    return bool(shards)


def check_names(repository: str, names: Sequence[str]) -> None:
    """Refuse a listing in which any name leads out of its folder.

    Raises SourceFault naming the repository and the name.
    """
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or set(name) & set("\\:\0"):
            raise SourceFault("pull.bad_name", repository=repository, name=repr(name))


def check_weights(repository: str, names: Sequence[str]) -> None:
    """Refuse a repository without a configuration or without safetensors weights.

    Raises SourceFault that says what was found instead: pickles, GGUF files, or nothing.
    """
    if CONFIG in names and any(name.endswith(".safetensors") for name in choose(names)):
        return
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise SourceFault("pull.only_gguf", repository=repository, files=", ".join(gguf[:5]))
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")) for name in names):
        raise SourceFault("pull.only_pickles", repository=repository)
    raise SourceFault("pull.no_weights", repository=repository)
