"""Streamed text: joined deltas equal the whole for every cut, and nothing passes a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_corpus import CORPUS

from decodescope.errors import InputError
from decodescope.text.stream import StopStrings, TextStream
from decodescope.text.tokenizer import Tokenizer

# Whole texts, single bytes of every kind, control tokens and rows without a name.
STARTER_IDS = st.lists(
    st.one_of(st.integers(0, 255), st.integers(0, 151935), st.integers(151643, 151664), st.just(220))
)
SMALL_IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49160)))
SPM_IDS = st.lists(st.integers(0, 430))


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, ids), stream.flush()]


def streams_like_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special=True)
    for cut in range(len(ids)):  # what is printed after each token is a beginning of the whole
        stream = TextStream(tokenizer)
        printed = "".join(map(stream.push, ids[:cut]))
        assert printed == "".join(parts[:cut])
        assert printed + stream.flush() == tokenizer.decode(ids[:cut], skip_special=True)


@given(STARTER_IDS)
def test_any_ids_of_the_starter_stream_like_the_whole(starter: Tokenizer, ids: list[int]) -> None:
    streams_like_the_whole(starter, ids)


@given(SMALL_IDS)
def test_any_ids_of_the_small_model_stream_like_the_whole(small: Tokenizer, ids: list[int]) -> None:
    streams_like_the_whole(small, ids)


@given(SPM_IDS)
def test_any_ids_of_a_sentencepiece_model_stream_like_the_whole(spm_tokenizer: Tokenizer, ids: list[int]) -> None:
    streams_like_the_whole(spm_tokenizer, ids)


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_no_half_character_of_a_text_is_ever_printed(
    starter: Tokenizer, spm_tokenizer: Tokenizer, text: str
) -> None:
    for tokenizer in (starter, spm_tokenizer):
        printed = deltas(tokenizer, tokenizer.encode(text))
        assert sum(part.count("\ufffd") for part in printed) == text.count("\ufffd")
        assert printed[-1] == ""


def test_an_unfinished_character_is_held_back_and_shown_at_the_end(starter: Tokenizer) -> None:
    stream = TextStream(starter)
    assert [stream.push(82912), stream.push(246)] == ["", "龘"]
    assert [stream.push(82912), stream.push(35727)] == ["", "�天"]
    assert [stream.push(82912), stream.flush(), stream.push(246)] == ["", "�", "�"]


def test_special_tokens_print_nothing_even_inside_a_character(starter: Tokenizer) -> None:
    stream = TextStream(starter)
    assert [stream.push(i) for i in (82912, 151645, 246, 151700, 151657)] == ["", "", "龘", "", "<tool_call>"]


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode("the model")
    assert "".join(deltas(spm_tokenizer, ids)) == "the model"
    stream = TextStream(spm_tokenizer)
    assert "".join(stream.push(i) for i in ids + ids) == "the model the model"


def stopped(strings: list[str], chunks: list[str]) -> tuple[str, str | None]:
    stops = StopStrings(strings)
    return "".join([*map(stops.push, chunks), stops.flush()]), stops.found


def first_complete(strings: list[str], text: str) -> tuple[str, str | None]:
    """The law in its plainest form: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [s for s in strings if text[:end].endswith(s)]
        if hits:
            return text[: end - len(max(hits, key=len))], max(hits, key=len)
    return text, None


SHORT = st.text("ab\n", min_size=1, max_size=4)


@given(st.lists(SHORT, max_size=3), st.lists(st.text("ab\n", max_size=5), max_size=6))
def test_every_cut_stops_where_the_first_stop_string_is_complete(strings: list[str], chunks: list[str]) -> None:
    assert stopped(strings, chunks) == first_complete(strings, "".join(chunks))


@given(st.lists(SHORT, min_size=1, max_size=3), st.text("ab\n", max_size=20))
def test_text_is_held_back_no_longer_than_it_could_still_become_a_stop_string(
    strings: list[str], text: str
) -> None:
    stops, printed = StopStrings(strings), ""
    for end, letter in enumerate(text, start=1):
        printed += stops.push(letter)
        if stops.found is not None:
            return
        held = text[len(printed) : end]
        assert held == "" or any(string.startswith(held) for string in strings)


def test_nothing_follows_a_stop_string() -> None:
    stops = StopStrings(["\n\n", "END"])
    assert [stops.push(part) for part in ("one\n", "two E", "N", "D three", "four")] == [
        "one",
        "\ntwo ",
        "",
        "",
        "",
    ]
    assert stops.found == "END" and stops.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    stops = StopStrings([])
    assert stops.push("anything") == "anything" and stops.found is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="stop string"):
        StopStrings(["a", ""])
