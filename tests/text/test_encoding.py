"""Ids equal transformers' for any text; the facts of FACTS.md about Qwen2.5's tokenizer hold."""

import threading
import time
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_corpus import CORPUS
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerBase

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader
from decodescope.text.tokenizer import Tokenizer, open_tokenizer

# Every plane is as likely as the first, which has nearly all of the characters people write.
ANY_PLANE = st.integers(0, 16).flatmap(
    lambda plane: st.characters(
        min_codepoint=plane << 16, max_codepoint=(plane << 16) + 0xFFFF, exclude_categories=["Cs"]
    )
)
ANY_TEXT = st.lists(st.one_of(ANY_PLANE, st.characters(codec="utf-8"), st.sampled_from(" \n\t09azé中<|>"))).map(
    "".join
)
MARKS = st.sampled_from(["<|im_end|>", "<|endoftext|>", "<tool_call>", "<|im_", " ", "\n\n", "e\u0301"])
TEXT_WITH_MARKS = st.lists(st.one_of(ANY_TEXT, MARKS), max_size=6).map("".join)


def same_ids(ours: Tokenizer, reference: PreTrainedTokenizerBase, text: str) -> None:
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_of_the_corpus_equal_those_of_transformers(
    text: str,
    starter: Tokenizer,
    small: Tokenizer,
    starter_reference: PreTrainedTokenizerBase,
    small_reference: PreTrainedTokenizerBase,
) -> None:
    same_ids(starter, starter_reference, text)
    same_ids(small, small_reference, text)


@given(TEXT_WITH_MARKS)
def test_ids_of_any_text_equal_those_of_transformers(
    starter: Tokenizer, starter_reference: PreTrainedTokenizerBase, text: str
) -> None:
    same_ids(starter, starter_reference, text)


@given(TEXT_WITH_MARKS)
def test_ids_of_any_text_equal_those_of_transformers_on_the_small_model(
    small: Tokenizer, small_reference: PreTrainedTokenizerBase, text: str
) -> None:
    same_ids(small, small_reference, text)


@given(TEXT_WITH_MARKS)
def test_decoding_gives_back_the_nfc_form_of_any_text(starter: Tokenizer, text: str) -> None:
    # The tables of Python and of the tokenizers library may be of different Unicode versions.
    assert starter.decode(starter.encode(text)) in (unicodedata.normalize("NFC", text), NFC().normalize_str(text))


@given(TEXT_WITH_MARKS)
def test_token_bytes_join_to_the_text(starter: Tokenizer, text: str) -> None:
    normal = NFC().normalize_str(text)
    assert b"".join(map(starter.token_bytes, starter.encode(normal))) == normal.encode()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("春天", [105303]),
        ("春", [99528]),
        ("天", [35727]),
        ("你好", [108386]),
        ("是一种", [101158]),
        ("是", [20412]),
        ("一种", [101053]),
        ("用一句话解释什么是大语言模型", [11622, 105321, 104136, 106582, 26288, 102064, 104949]),
        ("大语言模型是一种", [26288, 102064, 104949, 101158]),
        ("请写一首关于春天的诗", [14880, 61443, 108462, 101888, 105303, 9370, 100045]),
        ("system", [8948]),
        ("user", [872]),
        ("assistant", [77091]),
        ("\n", [198]),
        ("e\u0301", [963]),  # composed: NFC
        ("！", [6313]),  # not made half-width: not NFKC
        ("，", [3837]),
        ("。", [1773]),
        ("Ａ", [133054]),
        ("〇", [1277, 229]),
        ("龘", [82912, 246]),
        ("!", [0]),
        ("<|endoftext|>", [151643]),
        ("<|im_start|>", [151644]),
        ("<|im_end|>", [151645]),
        ("<tool_call>", [151657]),
        ("</tool_call>", [151658]),
    ],
)
def test_published_ids_hold(starter: Tokenizer, text: str, ids: list[int]) -> None:
    assert starter.encode(text) == ids


def test_the_articles_ids_for_spring_are_other_words(starter: Tokenizer) -> None:
    assert starter.decode([112522, 112523]) == "浸泡传送"


def test_digits_are_single_tokens(either: Tokenizer) -> None:
    assert len(either.encode("1234567")) == 7


def test_every_byte_has_a_token_and_the_single_bytes_come_first(starter: Tokenizer) -> None:
    assert {starter.token_bytes(token_id) for token_id in range(256)} == {bytes([b]) for b in range(256)}


def test_chinese_costs_well_under_one_token_a_character(starter: Tokenizer) -> None:
    text = "自回归语言模型一次只写一个词元，先把整段提示读入缓存，然后每一步都根据前文给出下一个词元的概率。"
    assert 0.5 < len(starter.encode(text)) / len(text) < 0.75


def test_thousands_of_chinese_characters_are_single_tokens(starter: Tokenizer) -> None:
    assert sum(len(starter.encode(chr(point))) == 1 for point in range(0x4E00, 0xA000)) == 8501


def test_the_starter_has_151665_tokens_and_its_padding_rows_have_no_name(starter: Tokenizer) -> None:
    assert starter.size == 151665
    for token_id in (151665, 151700, 151935, 10**9, -1):
        assert starter.token_bytes(token_id) == b""
        assert starter.token_text(token_id) == f"[unnamed {token_id}]"
        assert starter.decode([token_id]) == ""
    assert max(starter.encode("[PAD151700]")) < 151643


def test_every_end_id_of_the_models_is_known(starter: Tokenizer, small: Tokenizer) -> None:
    assert starter.end_ids == {151645, 151643}
    assert small.end_ids == {2, 0}


def test_special_tokens_are_special_and_tool_calls_are_not(starter: Tokenizer) -> None:
    assert starter.is_special(151645) and starter.token_text(151645) == "<|im_end|>"
    assert not starter.is_special(151657)
    assert len(starter.special_ids) == 20
    assert starter.token_id("<|im_end|>") == 151645 and starter.token_id("<tool_call>") == 151657
    assert starter.token_id("春天") is None
    assert starter.decode([151645], skip_special=True) == ""
    assert starter.decode([108386, 151645, 151657], skip_special=True) == "你好<tool_call>"
    assert starter.decode([108386, 151645]) == "你好<|im_end|>"


def test_a_partial_character_is_shown_as_a_replacement_character(starter: Tokenizer) -> None:
    assert starter.decode([82912]) == "�"
    assert starter.token_text(82912) == "�"
    assert starter.token_bytes(82912) + starter.token_bytes(246) == "龘".encode()


def test_the_starter_adds_no_bos(starter: Tokenizer) -> None:
    assert starter.bos_id == 151643 and not starter.adds_bos and starter.before == starter.after == ()


def test_half_surrogates_are_refused_with_their_place(either: Tokenizer) -> None:
    with pytest.raises(InputError, match="character 3"):
        either.encode("ab\udce9")


def test_a_path_that_holds_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path / "notes.txt", tmp_path / "absent"):
        with pytest.raises(InputError, match="no tokenizer"):
            open_tokenizer(path)


def test_opening_the_starter_takes_a_fraction_of_a_second(starter_header: GGUFHeader) -> None:
    """Some 0.25 s; minutes when 151,936 tokens are added one by one. The bound leaves room for busy machines."""

    def processor_seconds(action: Callable[[], object]) -> float:
        begun = time.process_time()
        action()
        return time.process_time() - begun

    assert min(processor_seconds(lambda: Tokenizer.from_gguf(starter_header)) for _ in range(3)) < 1.5


def test_others_go_on_while_a_long_text_becomes_ids(small: Tokenizer) -> None:
    laps, over = [], threading.Event()

    def run() -> None:
        while not over.wait(0.005):
            laps.append(time.perf_counter())

    runner = threading.Thread(target=run)
    runner.start()
    began = time.perf_counter()
    small.encode("a" * (1 << 20))
    ended = time.perf_counter()
    over.set()
    runner.join()
    during = [began, *(lap for lap in laps if began < lap < ended), ended]
    assert max(later - lap for lap, later in pairwise(during)) < (ended - began) / 2
