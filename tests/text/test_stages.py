"""Each stage from text to ids is what it says, and they fit together."""

from hypothesis import given
from mixed_corpus import CORPUS
from test_encoding import TEXT_WITH_MARKS
from tokenizers.normalizers import NFC

from decodescope.text.tokenizer import Piece, Stages, Tokenizer


def pieces_spelled(stages: Stages) -> list[bytes]:
    spelled = [b""] * len(stages.pieces)
    for token, piece in zip(stages.tokens, stages.piece_of, strict=True):
        spelled[piece] += token.bytes
    return spelled


def fits_together(tokenizer: Tokenizer, text: str) -> Stages:
    stages = tokenizer.stages(text)
    assert stages.text == text
    assert "".join(piece.text for piece in stages.pieces) == stages.normalised
    assert stages.ids == tokenizer.encode(text)
    assert list(stages.piece_of) == sorted(stages.piece_of)
    for i, (piece, raw) in enumerate(zip(stages.pieces, pieces_spelled(stages), strict=True)):
        assert (raw == piece.text.encode()) == (i not in stages.dropped)
    return stages


def test_the_stages_of_the_corpus_fit_together(either: Tokenizer) -> None:
    for text in CORPUS:
        fits_together(either, text)


@given(TEXT_WITH_MARKS)
def test_the_stages_of_any_text_fit_together_and_lose_nothing(starter: Tokenizer, text: str) -> None:
    assert fits_together(starter, text).dropped == ()


@given(TEXT_WITH_MARKS)
def test_normalising_happens_only_between_added_tokens(starter: Tokenizer, text: str) -> None:
    stages = starter.stages(text)
    assert stages.normalised == NFC().normalize_str(text)
    assert {piece.text for piece in stages.pieces if piece.added} <= {"<|im_end|>", "<|endoftext|>", "<tool_call>"}


def test_the_stages_of_one_text_in_full(starter: Tokenizer) -> None:
    stages = starter.stages("Cafe\u0301 龘<|im_end|>春天<tool_call>42")
    assert stages.normalised == "Caf\u00e9 龘<|im_end|>春天<tool_call>42"
    plain, added = [("Café", False), (" 龘", False), ("春天", False), ("4", False), ("2", False)], True
    assert stages.pieces == tuple(
        Piece(*piece)
        for piece in [*plain[:2], ("<|im_end|>", added), plain[2], ("<tool_call>", added), *plain[3:]]
    )
    assert stages.piece_of[-4:] == (3, 4, 5, 6)
    by_text = {token.text: token for token in stages.tokens}
    assert by_text["<|im_end|>"].special and by_text["<|im_end|>"].added
    assert by_text["<tool_call>"].added and not by_text["<tool_call>"].special
    assert not by_text["春天"].partial and by_text["春天"].bytes == "春天".encode()
    assert [token.partial for token in stages.tokens if token.bytes in (b" \xe9", b"\xbe", b"\x98")] == [True] * 3


def test_characters_a_vocabulary_cannot_spell_are_named(small: Tokenizer) -> None:
    """SmolLM2 has no token for some bytes; transformers drops them silently, and so must the ids."""
    stages = small.stages("ok \x04 fine")
    assert [stages.pieces[i].text for i in stages.dropped] == [" \x04"]
    assert small.decode(stages.ids) == "ok  fine"
