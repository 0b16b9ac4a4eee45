"""A tokenizer rebuilt from GGUF metadata, with the normaliser and pre-tokeniser the file only names.

The splitting rules are those of the models' own `tokenizer.json`; llama.cpp's `llama-vocab.cpp` lists which
`tokenizer.ggml.pre` name stands for which. NFC is the one rule a GGUF file does not mention at all.
"""

import math
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Normalizer, Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as InOrder

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader
from decodescope.text.blueprint import Blueprint, foreign_faults, one_line
from decodescope.text.spelling import Spelling, byte_level, sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

_END_NAMES = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<eos>",
    "<end_of_turn>", "<EOT>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "pad_token": "padding_token_id"}  # fmt: skip

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_QWEN2 = rf"{_WORD}|\p{{N}}{_TAIL}"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LONGEST_ENTRY = 1024  # characters; cutting an entry in all places is quadratic in its length


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a `tokenizer.ggml.pre` name stands for. `pattern` None: GPT-2's own, inside ByteLevel."""

    pattern: str | None
    nfc: bool = False
    digits: bool = False
    whole_words: bool = False  # a piece that is an entry is taken without merging
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        if self.pattern is None:
            bytes_ = ByteLevel(add_prefix_space=False, use_regex=True)
            return InOrder([Digits(individual_digits=True), bytes_]) if self.digits else bytes_
        split = Split(Regex(self.pattern), behavior="isolated")
        return InOrder([split, ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_RULES = _Rules(_LLAMA3, whole_words=True, adds_bos=True)
_PRE = {
    "qwen2": _Rules(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Rules(_QWEN2, nfc=True),
    "llama-bpe": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "tekken": _Rules(_TEKKEN, whole_words=True, adds_bos=True),
    "smollm": _Rules(None, digits=True),
    "gpt-2": _Rules(None),
    "default": _Rules(None),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked arrays of one file, and its other values by the name after `tokenizer.ggml.`."""

    header: GGUFHeader
    entries: list[str]
    kinds: tuple[int, ...]

    def value(self, name: str) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(self.header, name)
        return default if value is None else value

    def id(self, name: str) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.entries) or self.kinds[value] == UNUSED:
            raise InputError(
                "text.gguf_id", path=self.header.path, name=f"tokenizer.ggml.{name}", value=one_line(value)
            )
        return value

    def of_kind(self, *kinds: int) -> list[str]:
        return [entry for entry, kind in zip(self.entries, self.kinds, strict=True) if kind in kinds]

    def ids(self) -> dict[str, int]:
        """Entry -> id, without the rows that only fill up the embedding."""
        rows = enumerate(zip(self.entries, self.kinds, strict=True))
        return {entry: token_id for token_id, (entry, kind) in rows if kind != UNUSED}


def blueprint_from_gguf(header: GGUFHeader) -> Blueprint:
    """Rebuild the tokenizer a GGUF file describes.

    Raises InputError for an unknown `tokenizer.ggml.model` or `pre`, and for metadata of the wrong type,
    length or range.
    """
    vocabulary = _vocabulary(header)
    model = vocabulary.value("model")
    if model == "gpt2":
        return _byte_level(vocabulary)
    if model == "llama":
        return _sentencepiece(vocabulary)
    raise InputError("text.gguf_model", path=header.path, model=one_line(model))


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    entries = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) for entry in entries):
        raise _wrong(header, "tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type", (NORMAL,) * len(entries))
    if not isinstance(kinds, tuple) or len(kinds) != len(entries):
        raise _wrong(header, "token_type")
    return _Vocabulary(header, entries, kinds)


def _wrong(header: GGUFHeader, name: str) -> InputError:
    return InputError("text.gguf_value", path=header.path, name=f"tokenizer.ggml.{name}")


def _byte_level(vocabulary: _Vocabulary) -> Blueprint:
    pre = vocabulary.value("pre") or "default"
    rules = _PRE.get(pre) if isinstance(pre, str) else None
    if rules is None:
        raise InputError("text.gguf_pre", path=vocabulary.header.path, pre=one_line(pre), known=", ".join(_PRE))
    merges = _merges(vocabulary)
    with foreign_faults("text.gguf_merges", path=vocabulary.header.path):
        backend = Backend(BPE(vocabulary.ids(), merges, ignore_merges=rules.whole_words))
    if rules.nfc:
        backend.normalizer = NFC()
    backend.pre_tokenizer = rules.pre_tokenizer()
    return _finish(vocabulary, backend, byte_level, rules.adds_bos)


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = vocabulary.value("merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise _wrong(vocabulary.header, "merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for rank, (left, right) in enumerate(pairs):
        if not left or not right:
            raise InputError("text.gguf_merge", path=vocabulary.header.path, rank=rank)
    return pairs


def _sentencepiece(vocabulary: _Vocabulary) -> Blueprint:
    path = vocabulary.header.path
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if vocabulary.value(name):
            raise InputError("text.gguf_normaliser", path=path, name=f"tokenizer.ggml.{name}")
    unknown = next(iter(vocabulary.of_kind(UNKNOWN)), None)
    merges = merges_from_scores(_normal_scores(vocabulary))
    with foreign_faults("text.gguf_merges", path=path):
        model = BPE(vocabulary.ids(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Backend(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    steps: list[Normalizer] = [Prepend("▁")] if prefix else []
    backend.normalizer = Sequence([*steps, Replace(" ", "▁")])
    return _finish(vocabulary, backend, sentencepiece, adds_bos=True, drops_first_space=prefix)


def _normal_scores(vocabulary: _Vocabulary) -> dict[str, float]:
    """The score of each entry that merging may form."""
    scores = vocabulary.value("scores")
    if not isinstance(scores, tuple) or len(scores) != len(vocabulary.entries):
        raise _wrong(vocabulary.header, "scores")
    if not all(map(math.isfinite, scores)):
        raise _wrong(vocabulary.header, "scores")
    rows = zip(vocabulary.entries, scores, vocabulary.kinds, strict=True)
    normal = {entry: score for entry, score, kind in rows if kind == NORMAL}
    if max(map(len, normal), default=0) > _LONGEST_ENTRY:
        raise InputError("text.gguf_long_entry", path=vocabulary.header.path, limit=_LONGEST_ENTRY)
    return normal


def merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: every way to cut an entry into two entries is one, best score first.

    Equal scores are ordered as transformers' converter does: longer left half, then longer right half.
    """
    merges = [
        (score, entry[:cut], entry[cut:])
        for entry, score in scores.items()
        for cut in range(1, len(entry))
        if entry[:cut] in scores and entry[cut:] in scores
    ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _finish(
    vocabulary: _Vocabulary,
    backend: Backend,
    spelling: Spelling,
    adds_bos: bool,
    drops_first_space: bool = False,
) -> Blueprint:
    _add_whole_tokens(vocabulary, backend)
    bos, eos = vocabulary.id("bos_token_id"), vocabulary.id("eos_token_id")
    named = {name: vocabulary.id(key) for name, key in _NAMES.items()}
    return Blueprint(
        backend=backend,
        spelling=spelling,
        drops_first_space=drops_first_space,
        before=(bos,) if bos is not None and vocabulary.flag("add_bos_token", adds_bos) else (),
        after=(eos,) if eos is not None and vocabulary.flag("add_eos_token", False) else (),
        bos_id=bos,
        end_ids=_end_ids(vocabulary),
        names={name: vocabulary.entries[i] for name, i in named.items() if i is not None},
        chat_template=_chat_template(vocabulary.header),
    )


def _add_whole_tokens(vocabulary: _Vocabulary, backend: Backend) -> None:
    """Control tokens and those the user defined are found in a text before it is split."""
    special, plain = vocabulary.of_kind(CONTROL, UNKNOWN), vocabulary.of_kind(USER_DEFINED)
    backend.add_special_tokens([AddedToken(entry, normalized=False, special=True) for entry in special])
    backend.add_tokens([AddedToken(entry, normalized=False, special=False) for entry in plain])


def _end_ids(vocabulary: _Vocabulary) -> frozenset[int]:
    """Every id that ends a turn or a text: those the file declares, and control tokens known by name."""
    rows = enumerate(zip(vocabulary.entries, vocabulary.kinds, strict=True))
    named = {token_id for token_id, (entry, kind) in rows if kind == CONTROL and entry in _END_NAMES}
    declared = (vocabulary.id(name) for name in _END_KEYS)
    return frozenset(named.union(token_id for token_id in declared if token_id is not None))


def _chat_template(header: GGUFHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise InputError("text.gguf_value", path=header.path, name="tokenizer.chat_template")
    return template
