"""What a tokenizer file must tell before text can become ids: the common end of both readers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from decodescope.errors import InputError
from decodescope.text.spelling import Spelling


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A working backend and the facts around it.

    `before` and `after` are the ids put around raw text (BOS, EOS); `names` are the special tokens a chat
    template may name (`bos_token`, ...); `drops_first_space` says that decoding removes the space which
    encoding put in front.
    """

    backend: Backend
    spelling: Spelling
    drops_first_space: bool
    before: tuple[int, ...]
    after: tuple[int, ...]
    bos_id: int | None
    end_ids: frozenset[int]
    names: dict[str, str]
    chat_template: str | None


def parts(component: Any) -> Iterator[dict[str, Any]]:
    """A normaliser, pre-tokeniser or decoder of a backend as its JSON parts, sequences and what is in them."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        yield part
        for inner in ("normalizers", "pretokenizers", "decoders"):
            waiting += part.get(inner, [])


@contextmanager
def foreign_faults(key: str, **values: object) -> Iterator[None]:
    """Turn what the tokenizers library raises into `InputError(key, reason=..., **values)`.

    Its Rust panics do not derive from Exception, hence the wide net.
    """
    try:
        yield
    except BaseException as fault:
        ours = isinstance(fault, InputError) or not (
            isinstance(fault, Exception) or type(fault).__name__ == "PanicException"
        )
        if ours:
            raise
        raise InputError(key, reason=one_line(fault), **values) from None


def one_line(fault: object) -> str:
    """A foreign message made fit for a sentence of ours: one printable line of at most 300 characters."""
    words = " ".join(str(fault).split())[:300].rstrip(".")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
