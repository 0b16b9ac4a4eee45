"""Text to ids and back, one token's bytes and name, and the stages in between."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader, is_gguf, read_header
from decodescope.text.blueprint import Blueprint, foreign_faults
from decodescope.text.fewest import Longest, longest
from decodescope.text.folder_tokenizer import blueprint_from_folder
from decodescope.text.gguf_tokenizer import blueprint_from_gguf
from decodescope.text.spelling import byte_level, is_partial

_ID_LIMIT = 1 << 32  # the backend's ids are unsigned 32-bit numbers


@dataclass(frozen=True, slots=True)
class Token:
    """One token: `partial` when its bytes are only part of a character, `added` when it is matched whole
    in the text before any splitting, `special` when it is also a control token."""

    id: int
    text: str
    bytes: bytes
    partial: bool
    added: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What the pre-tokeniser cut: merges never cross a piece. `added`: a token matched whole."""

    text: str
    added: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """How a text becomes ids. `piece_of[i]` is the index of the piece that token i belongs to; `dropped`
    holds the indices of pieces with characters which the vocabulary cannot spell and therefore lost."""

    text: str
    normalised: str
    pieces: tuple[Piece, ...]
    tokens: tuple[Token, ...]
    piece_of: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """The ids, in order."""
        return [token.id for token in self.tokens]


def open_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder or of a GGUF file.

    Raises InputError when there is neither, or when what is there cannot be understood.
    """
    if path.is_dir():
        return Tokenizer.from_folder(path)
    if path.is_file() and is_gguf(path):
        return Tokenizer.from_gguf(read_header(path))
    raise InputError("text.no_tokenizer", path=path)


class Tokenizer:
    """A vocabulary with its rules; built by `from_folder`, `from_gguf` or `open_tokenizer`."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._backend = blueprint.backend
        self._spelling = blueprint.spelling
        added = blueprint.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._added_ids = {content: token_id for token_id, content in self._added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.drops_first_space = blueprint.drops_first_space
        self.before, self.after = blueprint.before, blueprint.after
        self.bos_id, self.end_ids = blueprint.bos_id, blueprint.end_ids
        self.names, self.chat_template = blueprint.names, blueprint.chat_template

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """From `tokenizer.json` and the JSON files beside it; raises InputError."""
        return cls(blueprint_from_folder(path))

    @classmethod
    def from_gguf(cls, header: GGUFHeader) -> "Tokenizer":
        """Rebuilt from a GGUF file's metadata; raises InputError."""
        return cls(blueprint_from_gguf(header))

    @property
    def size(self) -> int:
        """How many ids have a name; the model's logits may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def adds_bos(self) -> bool:
        """Whether raw text is started with the BOS id."""
        return self.bos_id is not None and self.bos_id in self.before

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without BOS or EOS. Special-token text in it becomes the control id."""
        return self._encode(text).ids

    def continuation(self, text: str) -> list[int]:
        """The ids that put exactly `text` behind what is there: without the space that some put before a start."""
        ids = self.encode(text)
        if self.drops_first_space and text.startswith(" "):
            ids = self.encode(text[1:])
        return ids

    def encode_spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) per token: the characters of `text` it came from; a partial token has its whole one."""
        encoding = self._encode(text)
        return [(token_id, *span) for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def fewest(self, text: str) -> int:
        """How many tokens a text has at least, by no more than its size: nothing is tokenised."""
        return 0 if self._longest is None else self._longest.fewest(text)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids without a name nothing."""
        kept = (token_id for token_id in ids if not (skip_special and token_id in self.special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self.drops_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes a token stands for: an added token's name in UTF-8, nothing for a nameless id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        entry = self._backend.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None
        return b"" if entry is None else self._spelling(entry)

    def token_text(self, token_id: int) -> str:
        """A token for display: special ids by name, unfinished characters as U+FFFD, `[unnamed 151700]`."""
        if not 0 <= token_id < _ID_LIMIT or self._backend.id_to_token(token_id) is None:
            return f"[unnamed {token_id}]"
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, left out of printed text."""
        return token_id in self.special_ids

    def token_id(self, text: str) -> int | None:
        """The id of an added token (`<|im_end|>`) by its exact text."""
        return self._added_ids.get(text)

    def token(self, token_id: int) -> Token:
        """All that is known about one id."""
        raw = self.token_bytes(token_id)
        added, special = token_id in self._added, token_id in self.special_ids
        return Token(token_id, self.token_text(token_id), raw, is_partial(raw), added, special)

    def stages(self, text: str) -> Stages:
        """Every stage from text to ids; normalising and splitting happen only between added tokens."""
        encoding = self._encode(text)
        normalised, pieces = "", []
        for part, added in self._parts(text, encoding):
            plain = part if added else self._normalise(part)
            normalised += plain
            pieces += [Piece(part, True)] if added else [Piece(cut, False) for cut in self._split(plain)]
        tokens = tuple(map(self.token, encoding.ids))
        piece_of = tuple(word or 0 for word in encoding.word_ids)
        dropped = _not_spelled(map(self._bytes_of_piece, pieces), tokens, piece_of)
        return Stages(text, normalised, tuple(pieces), tokens, piece_of, dropped)

    def _encode(self, text: str) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise InputError("text.not_unicode", place=fault.start + 1) from None
        with foreign_faults("text.cannot_encode"):
            # The call for many texts is the one that lets other threads run meanwhile.
            return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _parts(self, text: str, encoding: Encoding) -> Iterator[tuple[str, bool]]:
        """The text cut at added tokens: (part, whether it is such a token)."""
        at = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._added:
                if start > at:
                    yield text[at:start], False
                yield text[start:end], True
                at = end
        if at < len(text):
            yield text[at:], False

    def _normalise(self, text: str) -> str:
        normaliser = self._backend.normalizer
        return text if normaliser is None else normaliser.normalize_str(text)

    def _split(self, text: str) -> list[str]:
        splitter = self._backend.pre_tokenizer
        cuts = [text] if splitter is None else [cut for cut, _ in splitter.pre_tokenize_str(text)]
        return [byte_level(cut).decode("utf-8", "replace") for cut in cuts] if self._is_byte_level else cuts

    def _bytes_of_piece(self, piece: Piece) -> bytes:
        plain = piece.added or self._is_byte_level
        return (piece.text if plain else piece.text.replace("▁", " ")).encode()

    @cached_property
    def _longest(self) -> Longest | None:
        return longest(self._backend, self._spelling)

    @property
    def _is_byte_level(self) -> bool:
        return self._spelling is byte_level


def _not_spelled(
    expected: Iterable[bytes], tokens: tuple[Token, ...], piece_of: tuple[int, ...]
) -> tuple[int, ...]:
    """The indices of the pieces whose tokens do not add up to the bytes expected."""
    spelled: defaultdict[int, bytes] = defaultdict(bytes)
    for token, piece in zip(tokens, piece_of, strict=True):
        spelled[piece] += token.bytes
    return tuple(i for i, raw in enumerate(expected) if spelled[i] != raw)
