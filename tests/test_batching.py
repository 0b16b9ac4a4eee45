"""Sequences that share passes: each gets what it would get alone, whoever else joins or leaves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.batching import forward_together
from decodescope.generate import Decoding, Limits
from decodescope.model.cache_formats import FORMATS
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from families import VOCABULARY

TOKENS = 8


def decoding_of(model: CausalLM, length: int, seed: int, **limits) -> Decoding:
    prompt = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Decoding(model, [prompt], [Sampler(SamplingParams())], Limits(TOKENS, **limits))


def alone(model: CausalLM, length: int, seed: int, **limits) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens of a sequence and the logits behind each."""
    decoding, ids, logits = decoding_of(model, length, seed, **limits), [], []
    while decoding.active:
        decoding.forward()
        (decoded,) = decoding.choose()
        ids.append(decoded.choice.token_id)
        logits.append(decoded.choice.raw)
    return ids, logits


def together(decodings: list[Decoding], joins_at: list[int]) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The same of sequences that join at some turns and leave when they end."""
    found: list[tuple[list[int], list[torch.Tensor]]] = [([], []) for _ in decodings]
    turn = 0
    while any(each.active for each in decodings):
        joined = [row for row, each in enumerate(decodings) if joins_at[row] <= turn and each.active]
        reading = [row for row in joined if not found[row][0]]
        for row in reading:
            decodings[row].forward()
        ready = [row for row in joined if row not in reading]
        if ready:
            forward_together([decodings[row] for row in ready])
        for row in joined:
            (decoded,) = decodings[row].choose()
            found[row][0].append(decoded.choice.token_id)
            found[row][1].append(decoded.choice.raw)
        turn += 1
    return found


def same(one: tuple[list[int], list[torch.Tensor]], other: tuple[list[int], list[torch.Tensor]]) -> None:
    assert one[0] == other[0]
    for here, there in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=2e-4)


def test_rows_of_any_length_get_what_they_get_alone_in_every_family(pair):
    model, _ = pair
    lengths = (1, 3, 9, 30)
    found = together([decoding_of(model, n, seed) for seed, n in enumerate(lengths)], [0, 2, 1, 0])
    for seed, length in enumerate(lengths):
        same(found[seed], alone(model, length, seed))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_share_passes_over_caches_in_every_format(tiny_folders, name):
    model, _ = load_model(tiny_folders["qwen3-gqa"])
    held = {"cache_dtype": FORMATS[name]}
    found = together([decoding_of(model, n, n, **held) for n in (2, 7)], [0, 0])
    for row, length in enumerate((2, 7)):
        same(found[row], alone(model, length, length, **held))


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=5))
def test_whoever_joins_or_leaves_changes_nobody(tiny_folders, rows):
    model, _ = load_model(tiny_folders["qwen2-gqa"])
    found = together([decoding_of(model, n, seed) for seed, (n, _) in enumerate(rows)], [at for _, at in rows])
    for seed, (length, _) in enumerate(rows):
        assert found[seed][0] == alone(model, length, seed)[0]


def test_a_sequence_that_has_more_than_one_token_to_read_is_refused(tiny_folders):
    model, _ = load_model(tiny_folders["qwen2-gqa"])
    with pytest.raises(ValueError, match="3 unseen tokens"):
        forward_together([decoding_of(model, 3, 0)])


def test_a_prompt_read_ahead_in_chunks_gives_the_logits_of_one_read_at_once(tiny_folders):
    model, _ = load_model(tiny_folders["qwen2-gqa"])
    chunked, whole = decoding_of(model, 20, 1, prefill_chunk=6), decoding_of(model, 20, 1)
    reads = 0
    while chunked.read_chunk():
        reads += 1
    assert reads == 3  # what is left, two tokens, is forward's
    chunked.forward()
    whole.forward()
    torch.testing.assert_close(chunked.choose()[0].choice.raw, whole.choose()[0].choice.raw, rtol=0, atol=1e-5)
