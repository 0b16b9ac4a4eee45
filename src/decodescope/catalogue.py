"""Facts without running: what a text becomes as ids, what a model is and costs, where it comes from."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from decodescope.errors import InputError
from decodescope.models import ModelFiles, Report, describe, find_model, hash_model, silent

if TYPE_CHECKING:
    from decodescope.model.weights import Weights

CONTEXTS = (4096, 32768, 131072)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One id: whose it is (`role`), a control id typed inside content (`injected`), part of a character."""

    id: int
    text: str
    bytes_hex: str
    role: str
    injected: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class Tokenization:
    """From text to ids: what each stage made of it. `dropped` pieces cannot be spelled by the vocabulary."""

    text: str
    normalised: str
    pieces: tuple[str, ...]
    dropped: tuple[str, ...]
    ids: tuple[int, ...]
    tokens: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that lies on this machine, and where it came from."""

    model: str
    path: str
    source: str
    revision: str | None
    sha256: str | None
    bytes: int
    cached: bool  # it was here already
    description: str  # the same in one sentence


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The table of one model; bytes everywhere, tokens where it says so."""

    config: dict[str, Any]
    parameters: dict[str, int]
    weight_bytes: dict[str, int]
    stored_bytes: dict[str, int]  # bytes on disk by storage format; empty without weights
    kv_bytes_per_token: dict[str, int]
    kv_bytes_at: dict[str, dict[int, int]]
    gqa_saving: float  # keys and values of all query heads / those that are kept
    fit: dict[str, Any]


def fetch(model: str, report: Report = silent) -> Pulled:
    """Find a model, fetching it where needed, and make sure that its hash is known. Raises InputError."""
    files = hash_model(find_model(model, report), report)
    return Pulled(
        model=files.name,
        path=str(files.path),
        source=files.source,
        revision=files.revision,
        sha256=files.sha256,
        bytes=files.bytes,
        cached=files.cached,
        description=describe(files),
    )


def _found(model: str, report: Report) -> ModelFiles:
    """The model's files, after saying where they came from."""
    files = find_model(model, report)
    report(describe(files))
    return files


def tokenize(
    model: str,
    text: str | None,
    *,
    chat: bool = False,
    system: str | None = None,
    messages_file: Path | None = None,
    report: Report = silent,
) -> Tokenization:
    """Every stage from text to ids; with `chat`, or a file of messages, through the chat template first.

    Never imports torch, so that it answers at once. Raises InputError.
    """
    from decodescope.text.chat import chat_prompt, raw_prompt
    from decodescope.text.messages import read_messages, with_system
    from decodescope.text.tokenizer import open_tokenizer

    if system is not None and not (chat or messages_file):
        raise InputError("chat.system_needs_chat")
    tokenizer = open_tokenizer(_found(model, report).path)
    if messages_file is not None:
        prompt = chat_prompt(tokenizer, with_system(read_messages(messages_file), system))
    elif chat:
        prompt = chat_prompt(tokenizer, with_system([{"role": "user", "content": text or ""}], system))
    else:
        prompt = raw_prompt(tokenizer, text or "")
    stages = tokenizer.stages(prompt.text)
    pieces = tuple(piece.text for piece in stages.pieces)
    return Tokenization(
        text=prompt.text,
        normalised=stages.normalised,
        pieces=pieces,
        dropped=tuple(pieces[i] for i in stages.dropped),
        ids=tuple(prompt.ids),
        tokens=tuple(TokenRow(t.id, t.text, t.bytes.hex(), t.role, t.injected, t.partial) for t in prompt.tokens),
    )


def model_card(model: str | None, config_file: Path | None, report: Report = silent) -> ModelCard:
    """The table of a model from its configuration, and of its files where it has some."""
    from decodescope.model.random_weights import RandomWeights
    from decodescope.model.weights import open_weights

    resident = psutil.Process().memory_info().rss  # before vocabularies are read
    if config_file is not None:
        return _card(RandomWeights(config_file), {}, resident)
    weights = open_weights(_found(model or "starter", report).path)
    return _card(weights, weights.stored_bytes(), resident)


def _card(weights: "Weights", stored: dict[str, int], resident_bytes: int) -> ModelCard:
    from decodescope.model import cost
    from decodescope.model.footprint import process_bytes, what_fits

    config, memory = weights.config, psutil.virtual_memory()
    parameters = cost.count_parameters(config)
    per_token = {name: cost.kv_bytes_per_token(config, *sizes) for name, sizes in cost.CACHE_FORMATS.items()}
    process = process_bytes(resident_bytes, config, vocabulary_read=False)
    fit = what_fits(weights, process, (memory.total, memory.available), stored=bool(stored))
    return ModelCard(
        config=asdict(config),
        parameters={"total": parameters.total, "non_embedding": parameters.non_embedding, **asdict(parameters)},
        weight_bytes={name: row["weight_bytes"] for name, row in fit["dtypes"].items()},
        stored_bytes=stored,
        kv_bytes_per_token=per_token,
        kv_bytes_at={name: {length: per * length for length in CONTEXTS} for name, per in per_token.items()},
        gqa_saving=config.num_attention_heads / config.num_key_value_heads,
        fit=fit,
    )
