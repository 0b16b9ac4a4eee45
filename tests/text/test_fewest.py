"""A text never has fewer tokens than its size says; where its rules might leave some of it out, nothing is said."""

import sys
import unicodedata
from collections import defaultdict
from itertools import chain

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from decodescope.text.fewest import longest
from decodescope.text.spelling import BYTE_ALPHABET, byte_level, sentencepiece

SHRINKING = "\u1fbe\u0308\u0301"  # by NFC from 7 bytes to 2
PIECES = (
    " ", "\n", "\t", "\r\n", "a", "#", "-", "=", "▁", "字", "😀", "e\u0301", "\u1100\u1161\u11a8", SHRINKING, "\u212a",
    "<|im_end|>", "<|endoftext|>", "<s>", "interconnectedness", "AutoresizingMaskIntoConstraints", "7",
    "\x04", "in\x04ter", "\U00050000",  # some bytes are in no entry of a small vocabulary
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 200)), max_size=6).map(
        lambda runs: "".join(piece * times for piece, times in runs)
    ),
)


@pytest.mark.parametrize("name", ["starter", "small", "spm_tokenizer"])
@given(text=TEXTS)
@example(text=SHRINKING * 100)
@example(text=" " * 1280)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_has_fewer_tokens_than_it_is_said_to_have(request, name, text):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.fewest(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [("starter", " " * 128), ("starter", ".translatesAutoresizingMaskIntoConstraints"), ("small", "#" * 80)],
)
def test_of_what_the_longest_tokens_cover_it_says_nearly_all_of_them(request, name, text):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.fewest(text * 100) >= 0.75 * len(tokenizer.encode(text * 100))


def test_a_text_that_is_no_unicode_has_a_size_too(small):
    assert small.fewest("\ud800" * 1000) > 0


def test_no_character_is_composed_of_more_bytes_than_is_reckoned_with():
    stands_for = defaultdict(list)  # a single decomposed character: by all that stands for it
    characters = [chr(code) for code in chain(range(0xD800), range(0xE000, sys.maxunicode + 1))]
    characters = [each for each in characters if unicodedata.category(each) != "Cn"]
    for each in characters:
        if len(apart := unicodedata.normalize("NFD", each)) == 1:
            stands_for[apart].append(len(each.encode()))
    worst = max(
        sum(max(stands_for[part]) for part in unicodedata.normalize("NFD", each)) / len(each.encode())
        for each in characters
        if unicodedata.normalize("NFC", each) == each
    )
    assert worst == 3.5


def backend(letters: list[str] | None = None, **model) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if letters is None else letters
    made = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, [], **model))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def stripping(made: Backend) -> None:
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def replacing(made: Backend) -> None:
    made.normalizer = normalizers.Replace(" ", "")


def removing(made: Backend) -> None:
    split = pre_tokenizers.Split(" ", behavior="removed")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def taking_along(made: Backend) -> None:
    made.add_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [stripping, replacing, removing, taking_along])
def test_rules_that_may_leave_spaces_out_promise_nothing(change):
    made = backend()
    assert longest(made, byte_level) is not None
    change(made)
    assert longest(made, byte_level) is None
    assert len(made.encode(" " * 1000 + "<mask>").ids) < 100


def test_bytes_that_a_vocabulary_lacks_do_not_count():
    made = backend(["a"])
    found = longest(made, byte_level)
    for text in ("b" * 1000, "ab" * 500, "é" * 500):
        assert found.fewest(text) == len(made.encode(text).ids)
    assert longest(backend(["a"], byte_fallback=True), sentencepiece) is None


@pytest.mark.parametrize("letters", [None, [each for each in BYTE_ALPHABET if BYTE_ALPHABET[each] < 0x80]])
@pytest.mark.parametrize("text", [SHRINKING * 100, "e\u0301" * 100, "a" * 100])
def test_what_is_composed_counts_no_more_than_what_it_becomes(letters, text):
    made = backend(letters)
    made.normalizer = normalizers.NFC()
    assert longest(made, byte_level).fewest(text) <= len(made.encode(text).ids)


def test_a_mark_of_a_space_in_the_text_itself_counts_as_the_bytes_that_it_is():
    entries = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    made = Backend(
        models.BPE({each: i for i, each in enumerate(entries)}, [("▁", "▁")], byte_fallback=True, fuse_unk=True)
    )
    found = longest(made, sentencepiece)
    assert found.fewest("▁" * 200) <= len(made.encode("▁" * 200).ids) == 100


def test_where_many_unknown_characters_may_be_one_token_nothing_is_promised():
    assert longest(backend(unk_token="a", fuse_unk=True), byte_level) is None
