"""Tokenizers rebuilt from GGUF metadata: every family of rules, and metadata that lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import WORDS, SpmPair, spm_header, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixed_corpus import CORPUS
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader
from decodescope.text.spelling import BYTE_ALPHABET
from decodescope.text.tokenizer import Tokenizer


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_of_a_rebuilt_sentencepiece_vocabulary_equal_those_of_sentencepiece(
    spm_pair: SpmPair, text: str
) -> None:
    ours, spm = spm_pair
    assert ours.encode(text) == spm.EncodeAsIds(text)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([*WORDS, " ", "  ", "\n", "<tool>"]), st.characters(codec="utf-8", min_codepoint=1)
        )
    )
)
def test_ids_of_any_text_equal_those_of_sentencepiece(spm_pair: SpmPair, parts: list[str]) -> None:
    ours, spm = spm_pair
    text = "".join(parts)
    if "<tool>" not in text:  # the space which is put before each part is compared with llama.cpp's rule below
        assert ours.encode(text) == spm.EncodeAsIds(text)
        assert ours.decode(ours.encode(text)) == spm.DecodeIds(spm.EncodeAsIds(text)) == text.replace("▁", " ")


def test_a_sentencepiece_vocabulary_equals_transformers_where_no_space_leads(
    spm_pair: SpmPair, tmp_path: Path
) -> None:
    """transformers puts no space before a text that begins with one; SentencePiece and llama.cpp do."""
    ours, spm = spm_pair
    spm_header(tmp_path / "spm.gguf", spm)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    for text in CORPUS:
        if text.strip() and not text.startswith((" ", "▁")):
            assert ours.encode(text) == reference.encode(text, add_special_tokens=False)


def test_sentencepiece_tokens_show_their_bytes(spm_pair: SpmPair) -> None:
    ours, spm = spm_pair
    stages = ours.stages("the 龘<tool>!")
    assert stages.normalised == "▁the▁龘<tool>▁!"
    assert [token.bytes for token in stages.tokens if token.partial] == [b"\xe9", b"\xbe", b"\x98"]
    assert [token.text for token in stages.tokens if token.partial] == ["�"] * 3
    assert ours.token_bytes(spm.PieceToId("▁the")) == b" the"
    assert stages.dropped == ()
    assert ours.decode(stages.ids) == "the 龘<tool> !"
    assert not ours.is_special(spm.PieceToId("<tool>")) and ours.is_special(spm.unk_id())


def test_a_sentencepiece_model_starts_raw_text_with_bos_unless_told_otherwise(
    spm_pair: SpmPair, tmp_path: Path
) -> None:
    ours, spm = spm_pair
    assert ours.adds_bos and ours.before == (spm.bos_id(),) and ours.after == ()
    assert ours.end_ids == {spm.eos_id()}
    other = Tokenizer.from_gguf(
        spm_header(tmp_path / "a.gguf", spm, add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    )
    assert other.before == () and other.after == (spm.eos_id(),)
    assert other.decode(other.encode(" the model")) == " the model"
    assert other.encode(" the model") == ours.encode("the model")


BASE = list(BYTE_ALPHABET)
MERGES = ["1 2", "12 3", "Ġ a", "a b", "Ġa b", "A B", "a B"]


def byte_level_header(path: Path, pre: str | None, *extra: str) -> GGUFHeader:
    tokens = [*BASE, *(merge.replace(" ", "") for merge in MERGES), *extra, "<s>", "</s>"]
    kinds = [1] * (len(tokens) - 2) + [3, 3]
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    named = {} if pre is None else {"tokenizer_pre": pre}
    return write_gguf(path, "gpt2", tokens, kinds, token_merges=MERGES, **named, **ends)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("qwen2", "123e\u0301", ["1", "2", "3", "Ã", "©"]),
        ("deepseek-r1-qwen", "123e\u0301", ["1", "2", "3", "Ã", "©"]),
        ("llama-bpe", "1234 ab", ["123", "4", "Ġab"]),
        ("llama3", "e\u0301", ["e", "Ì", "ģ"]),
        ("llama-v3", "xyz12", ["xyz", "12"]),  # xyz is an entry although no merge makes it
        ("tekken", "12aBAB", ["1", "2", "a", "B", "AB"]),  # the others would find aB, but tekken cuts there
        ("smollm", "123 ab", ["1", "2", "3", "Ġab"]),
        ("gpt-2", "1234 ab", ["123", "4", "Ġab"]),
        ("default", "1234 ab", ["123", "4", "Ġab"]),
        (None, "xyz", ["x", "y", "z"]),
    ],
)
def test_each_pre_tokeniser_splits_by_its_own_rules(
    pre: str | None, text: str, tokens: list[str], tmp_path: Path
) -> None:
    header = byte_level_header(tmp_path / "a.gguf", pre, "xyz")
    entries = header.metadata["tokenizer.ggml.tokens"]
    assert [entries[i] for i in Tokenizer.from_gguf(header).encode(text)] == tokens


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_byte_level_rules_equal_those_of_transformers(pre: str, tmp_path: Path) -> None:
    ours = Tokenizer.from_gguf(byte_level_header(tmp_path / "a.gguf", pre))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    split: Backend = reference.backend_tokenizer
    for text in CORPUS:
        mine = [piece.text for piece in ours.stages(text).pieces]
        if mine == [text] or ours.stages(text).normalised == text:  # transformers leaves out NFC
            theirs = [text[start:end] for _, (start, end) in split.pre_tokenizer.pre_tokenize_str(text)]
            assert mine == theirs


def test_llama_3_starts_raw_text_with_bos_and_the_others_do_not(tmp_path: Path) -> None:
    for pre, adds in [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]:
        assert Tokenizer.from_gguf(byte_level_header(tmp_path / f"{pre}.gguf", pre)).adds_bos == adds


WithMetadata = Callable[..., GGUFHeader]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "bert"}, "bert"),
        ({"model": None}, "None"),
        ({"model": 7}, "7"),
        ({"pre": "klingon"}, "klingon"),
        ({"pre": ["qwen2"]}, "qwen2"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokens": (1, 2, 3)}, "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b"]}, "tokenizer.ggml.token_type"),
        ({"token_type": (1, 1)}, "tokenizer.ggml.token_type"),
        ({"token_type": 3}, "tokenizer.ggml.token_type"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": (1, 2)}, "tokenizer.ggml.merges"),
        ({"merges": ["a"]}, "Merge 0"),
        ({"merges": ["h e", " a"]}, "Merge 1"),
        ({"merges": ["a "]}, "Merge 0"),
        ({"merges": ["no such"]}, "do not fit together"),
        ({"eos_token_id": 10**6}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eot_token_id": "2"}, "eot_token_id"),
        ({"eom_token_id": 1.5}, "eom_token_id"),
        ({"padding_token_id": 49152}, "padding_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"add_eos_token": "yes"}, "add_eos_token"),
        ({"chat_template": 5}, "chat_template"),
        ({"model": "llama", "scores": None}, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": (0.0,)}, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": (float("nan"),) * 49152}, "tokenizer.ggml.scores"),
        ({"model": "llama", "precompiled_charsmap": (1, 2)}, "precompiled_charsmap"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"model": "llama", "tokens": ["x" * 5000], "token_type": (1,), "scores": (0.0,)}, "1024"),
    ],
)
def test_metadata_that_lies_is_refused_by_name(
    with_metadata: WithMetadata, values: dict[str, Any], says: str
) -> None:
    header = with_metadata(**values)
    with pytest.raises(InputError) as fault:
        Tokenizer.from_gguf(header)
    assert says in str(fault.value) and str(header.path) in str(fault.value)


def test_an_end_id_without_a_name_is_refused(starter_header: GGUFHeader) -> None:
    header = GGUFHeader(
        starter_header.path, {**starter_header.metadata, "tokenizer.ggml.eos_token_id": 151700}, {}
    )
    with pytest.raises(InputError, match="151700"):
        Tokenizer.from_gguf(header)


ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=4), st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.lists(st.floats(width=32), max_size=4).map(tuple),
)  # fmt: skip
NAMES = [
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "add_bos_token",
    "unknown_token_id", "eot_token_id", "add_space_prefix", "chat_template",
]  # fmt: skip
SMALL_BASE = {
    "tokens": ["<s>", "a", "b", "ab", "▁", "<0x41>"],
    "token_type": (3, 1, 1, 1, 1, 6),
    "scores": (0.0, -2.0, -3.0, -1.0, -4.0, 0.0),
    "merges": ["a b"],
    "pre": "qwen2",
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["gpt2", "llama"]), st.dictionaries(st.sampled_from(NAMES), ODD_VALUES, max_size=3))
def test_no_metadata_whatever_raises_anything_but_a_sentence(
    with_metadata: WithMetadata, model: str, values: dict[str, Any]
) -> None:
    base = {"model": model, **SMALL_BASE, **dict.fromkeys(NAMES[6:])}
    try:
        tokenizer = Tokenizer.from_gguf(with_metadata(**{**base, **values}))
    except InputError as fault:
        assert str(fault)
    else:
        tokenizer.stages("ab <s> a龘")
        tokenizer.decode(range(-1, 9))
