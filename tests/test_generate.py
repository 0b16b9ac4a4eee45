"""Laws of the loop: when rows end, batches, chunks, replacing and taking back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.errors import InputError
from decodescope.generate import Decoding, Limits, Past, generate
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from families import BY_NAME, VOCABULARY

DRAWN = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def model(tiny_folders) -> CausalLM:
    return load_model(tiny_folders["qwen2-gqa"])[0]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(model: CausalLM, prompts: list[list[int]], params: SamplingParams, limits: Limits) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, [Sampler(params) for _ in prompts], limits):
        for decoded in step:
            rows[decoded.row].append(decoded.choice.token_id)
    return rows


def test_a_row_ends_at_a_stop_id_which_is_its_last_token(model):
    (free,) = rows_of(model, [prompt_of(5)], SamplingParams(), Limits(20))
    stop = free[4]
    (stopped,) = rows_of(model, [prompt_of(5)], SamplingParams(), Limits(20, frozenset({stop})))
    assert stopped == free[: free.index(stop) + 1]


def test_a_row_ends_at_its_length_and_says_so(model):
    steps = list(generate(model, [prompt_of(5)], [Sampler(SamplingParams())], Limits(7)))
    assert [s[0].ended for s in steps] == [None] * 6 + ["length"]
    assert [s[0].position for s in steps] == list(range(5, 12))


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("params", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_a_padded_batch_row_is_the_row_alone(tiny_folders, name, params):
    model, _ = load_model(tiny_folders[name])
    prompts = [prompt_of(length, seed=length) for length in (9, 1, 4, 17)]
    together = rows_of(model, prompts, params, Limits(16))
    alone = [rows_of(model, [prompt], params, Limits(16))[0] for prompt in prompts]
    assert together == alone


def test_rows_that_end_leave_the_others_as_they_were(model):
    prompts = [prompt_of(3, 1), prompt_of(8, 2), prompt_of(5, 3)]
    free = rows_of(model, prompts, SamplingParams(), Limits(15))
    stops = frozenset({free[1][2]})  # the longest prompt ends early: the padding of the others stays
    stopped = rows_of(model, prompts, SamplingParams(), Limits(15, stops))
    for row, full in zip(stopped, free, strict=True):
        assert row == full[: len(row)]
        assert len(row) == 15 or row[-1] in stops


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 40), chunk=st.integers(1, 41), cached=st.booleans())
def test_cached_equals_uncached_for_any_chunking(model, length, chunk, cached):
    prompt = prompt_of(length, seed=length)
    plain = rows_of(model, [prompt], DRAWN, Limits(6))
    assert rows_of(model, [prompt], DRAWN, Limits(6, use_cache=cached, prefill_chunk=chunk)) == plain


def run_to_end(decoding: Decoding) -> list[int]:
    ids = []
    while decoding.active:
        decoding.forward()
        ids += [d.choice.token_id for d in decoding.choose()]
    return ids


def test_replacing_a_token_is_a_straight_run_with_that_token(model):
    prompt = prompt_of(6)
    for step in (0, 3, 8):
        decoding = Decoding(model, [prompt], [Sampler(SamplingParams())], Limits(12))
        before = []
        for _ in range(step + 1):
            decoding.forward()
            (decoded,) = decoding.choose()
            before.append(decoded.choice.token_id)
        other = (decoded.choice.token_id + 1) % VOCABULARY
        forced = decoding.replace(decoded, other)
        assert forced.choice.forced and forced.choice.token_id == other
        after = run_to_end(decoding)
        straight = rows_of(model, [[*prompt, *before[:-1], other]], SamplingParams(), Limits(12 - step - 1))[0]
        assert after == straight


@pytest.mark.parametrize("params", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_rewinding_repeats_what_was_chosen(model, params):
    prompt = prompt_of(6)
    for back in range(8):
        decoding = Decoding(model, [prompt], [Sampler(params)], Limits(8))
        first = run_to_end(decoding)
        decoding.rewind(back)
        assert decoding.cache.length == max(len(prompt) + back - 1, 0)
        assert run_to_end(decoding) == first[back:]


def test_a_token_can_be_replaced_after_the_row_has_ended(model):
    decoding = Decoding(model, [prompt_of(4)], [Sampler(SamplingParams())], Limits(9, frozenset(range(50))))
    decoding.forward()
    (decoded,) = decoding.choose()
    other = 60
    assert decoded.ended == ("stop" if decoded.choice.token_id < 50 else None)
    assert decoding.replace(decoded, other).ended is None
    assert decoding.active == (0,)
    assert decoding.replace(decoded, 3).ended == "stop"
    assert decoding.active == ()


def test_only_single_sequences_can_be_rewound(model):
    decoding = Decoding(model, [[1], [2]], [Sampler(DRAWN), Sampler(DRAWN)], Limits(4))
    with pytest.raises(ValueError, match="single"):
        decoding.rewind(0)


def test_choosing_without_logits_is_refused(model):
    with pytest.raises(ValueError, match="forward"):
        Decoding(model, [[1]], [Sampler(DRAWN)], Limits(4)).choose()


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one id"):
        Decoding(model, [[]], [Sampler(DRAWN)], Limits(4))


def test_reading_a_long_prompt_tells_how_far_it_is(model):
    told: list[tuple[int, int]] = []
    decoding = Decoding(
        model, [prompt_of(10), prompt_of(3)], [Sampler(DRAWN), Sampler(DRAWN)], Limits(3, prefill_chunk=4)
    )
    decoding.on_prefill = lambda done, total: told.append((done, total))
    run_to_end(decoding)
    assert told == [(4, 10), (8, 10), (10, 10)]


SETTINGS = [
    SamplingParams(),
    DRAWN,
    SamplingParams(temperature=0.6, top_k=9, seed=3),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=1.4, min_p=0.02, seed=11),
]


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("limits", [{}, {"use_cache": False}, {"prefill_chunk": 4}], ids=str)
def test_rows_with_one_prompt_are_read_once_and_equal_the_rows_alone(tiny_folders, name, limits):
    model, _ = load_model(tiny_folders[name])
    prompt, read = prompt_of(13), []
    decoding = Decoding(model, [prompt] * len(SETTINGS), list(map(Sampler, SETTINGS)), Limits(18, **limits))
    rows: dict[int, list[int]] = {row: [] for row in decoding.active}
    watch = model.register_forward_pre_hook(lambda _, given: read.append(tuple(given[0].shape)))
    while decoding.active:
        decoding.forward()
        for decoded in decoding.choose():
            rows[decoded.row].append(decoded.choice.token_id)
    watch.remove()
    assert sum(B * T for B, T in read if B == 1) == 13
    alone = [run_to_end(Decoding(model, [prompt], [Sampler(p)], Limits(18, **limits))) for p in SETTINGS]
    assert list(rows.values()) == alone


def test_rows_that_end_at_the_first_token_leave_the_shared_past_to_the_others(model):
    prompt = prompt_of(9)
    first = run_to_end(Decoding(model, [prompt], [Sampler(SamplingParams())], Limits(1)))
    params = [SamplingParams(), DRAWN, SamplingParams()]
    decoding = Decoding(model, [prompt] * 3, list(map(Sampler, params)), Limits(8, frozenset(first)))
    found = []
    while decoding.active:
        decoding.forward()
        found += [d for d in decoding.choose() if d.row == 1]
    alone = run_to_end(Decoding(model, [prompt], [Sampler(DRAWN)], Limits(8, frozenset(first))))
    assert [d.choice.token_id for d in found] == alone and len(alone) > 1


@settings(max_examples=30, deadline=None)
@given(same=st.integers(0, 12), other=st.integers(0, 6), made=st.integers(0, 5), chunk=st.integers(1, 9))
def test_a_past_is_used_as_far_as_it_is_ours_and_changes_nothing(model, same, other, made, chunk):
    earlier = Decoding(model, [prompt_of(12, 1)], [Sampler(SamplingParams())], Limits(6))
    run_to_end(earlier)
    past, limits = earlier.past(), Limits(7, prefill_chunk=chunk)
    prompt = [*past.ids[:same], *prompt_of(other + 1, 2)]
    answer = tuple(prompt_of(made, 3))
    forked = Past(answer, past.ids, past.cache.fork())
    found = run_to_end(Decoding(model, [prompt], [Sampler(SamplingParams())], limits, forked))
    assert found == run_to_end(Decoding(model, [prompt], [Sampler(SamplingParams())], limits, Past(answer)))
    assert earlier.cache.length == len(past.ids)


def test_tokens_laid_down_overrule_the_sampler_and_its_draws_go_on(model):
    prompt, sampler = prompt_of(7), Sampler(DRAWN)
    decoding = Decoding(model, [prompt], [sampler], Limits(6))
    decoding.force(0, [5, 6])
    made = []
    while decoding.active:
        decoding.forward()
        made += decoding.choose()
    assert [d.choice.token_id for d in made][:2] == [5, 6]
    assert [(d.choice.forced, d.choice.drawn) for d in made] == [(True, False)] * 2 + [(False, True)] * 4
    later = Sampler(DRAWN)
    later.draws = 2
    rest = run_to_end(Decoding(model, [prompt], [later], Limits(6), Past((5, 6))))
    assert [d.choice.token_id for d in made][2:] == rest
    with pytest.raises(InputError, match="99999"):
        Decoding(model, [prompt], [Sampler(DRAWN)], Limits(6)).force(0, [99999])
