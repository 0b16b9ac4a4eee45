"""A tokenizer read from a Hugging Face folder: `tokenizer.json` and the small JSON files beside it."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from decodescope.errors import InputError
from decodescope.text.blueprint import Blueprint, foreign_faults, parts
from decodescope.text.spelling import Spelling, byte_level, sentencepiece

_LARGEST_FILE = 256 << 20  # bytes; the largest vocabularies in use need about 35 MB
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def blueprint_from_folder(folder: Path) -> Blueprint:
    """Read the tokenizer of a folder.

    Raises InputError for a missing, oversized or broken file and for a vocabulary that is neither
    byte-level nor SentencePiece.
    """
    backend = _backend(folder / "tokenizer.json")
    config = _settings(folder)
    names = {name: text for name in _NAMES if (text := _content(config.get(name))) is not None}
    components = [*parts(backend.decoder), *parts(backend.pre_tokenizer)]
    before, after = _affixes(backend)
    backend.post_processor = None  # it would trim the offsets that tell where a token came from
    return Blueprint(
        backend=backend,
        spelling=_spelling(components, folder),
        drops_first_space=any(map(_drops_first_space, components)),
        before=before,
        after=after,
        bos_id=next(iter(_named_id(backend, names, "bos_token")), None),
        end_ids=_end_ids(folder, backend, names),
        names=names,
        chat_template=_chat_template(folder, config),
    )


def _backend(path: Path) -> Backend:
    if not path.is_file():
        raise InputError("text.no_tokenizer_json", folder=path.parent)
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError("text.tokenizer_too_large", path=path, limit_mb=_LARGEST_FILE >> 20)
    with foreign_faults("text.bad_tokenizer_json", path=path):
        backend = Backend.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # a file can parse and still be unable to work
    return backend


def _settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` over `special_tokens_map.json`."""
    return _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise InputError("text.bad_json", path=path) from None
    if not isinstance(value, dict):
        raise InputError("text.bad_json", path=path)
    return value


def _content(token: Any) -> str | None:
    """A special token's text, written plainly or as an object with its matching rules."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _named_id(backend: Backend, names: dict[str, str], name: str) -> tuple[int, ...]:
    token_id = backend.token_to_id(names[name]) if name in names else None
    return () if token_id is None else (token_id,)


def _spelling(components: list[dict[str, Any]], folder: Path) -> Spelling:
    kinds = {part["type"] for part in components}
    if "ByteLevel" in kinds:
        return byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return sentencepiece
    raise InputError(
        "text.unknown_spelling", path=folder / "tokenizer.json", parts=", ".join(sorted(kinds)) or "-"
    )


def _drops_first_space(part: dict[str, Any]) -> bool:
    if part["type"] == "Strip":
        return bool(part.get("content") == " " and part.get("start", 0) >= 1)
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")


def _affixes(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids which the file's own post-processor puts before and after a text.

    As in transformers 5, `add_bos_token` of tokenizer_config.json has no say beside a tokenizer.json.
    """
    bare, full = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    starts = (i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare)
    start = next(starts, 0)
    return tuple(full[:start]), tuple(full[start + len(bare) :])


def _end_ids(folder: Path, backend: Backend, names: dict[str, str]) -> frozenset[int]:
    """All end ids declared in generation_config.json, config.json and by the tokenizer's own EOS."""
    ends = set(_named_id(backend, names, "eos_token"))
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _object(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InputError("text.bad_end_ids", path=path)
        ends.update(ids)
    return frozenset(ends)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template file if there is one, else the configuration's (of several, the one named `default`)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError("text.bad_template_file", path=file) from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InputError("text.bad_json", path=folder / "tokenizer_config.json")
    return template
