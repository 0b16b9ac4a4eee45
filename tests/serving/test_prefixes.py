"""Laws of kept prefixes: only what a prompt begins with is taken over, as a copy, within the room there is."""

import pytest
import torch

from decodescope.generate import NOTHING, Past
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.serving.prefixes import Held, Prefixes

IDS = tuple(range(20))
ROOM = 1 << 30  # bytes; more than anything here takes


@pytest.fixture(scope="module")
def model(tiny_folders) -> CausalLM:
    return load_model(tiny_folders["qwen2-gqa"])[0]


def cache_of(model: CausalLM, ids: tuple[int, ...]) -> KVCache:
    cache = KVCache(model.config.num_hidden_layers)
    model(torch.tensor([ids]), cache)
    return cache


def kept(model: CausalLM, *sequences: tuple[int, ...]) -> Prefixes:
    prefixes = Prefixes()
    for ids in sequences:
        prefixes.keep(Past((), ids, cache_of(model, ids)))
    return prefixes


def test_the_longest_common_beginning_is_taken_over_and_no_more(model):
    prefixes = kept(model, IDS[:12], (*IDS[:15], 90, 91))
    past = prefixes.past_of((*IDS[:15], 50, 51), [], 30, ROOM)
    assert past.ids == IDS[:15] and past.cache.length == 15
    fresh = cache_of(model, IDS[:15])
    for layer in range(model.config.num_hidden_layers):
        for mine, theirs in zip(past.cache.layer(layer), fresh.layer(layer), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_the_last_token_is_left_to_compute_also_of_a_prompt_known_whole(model):
    assert kept(model, IDS).past_of(IDS, [], 30, ROOM).ids == IDS[:-1]


def test_a_beginning_of_a_few_tokens_is_not_worth_a_copy(model):
    assert kept(model, IDS).past_of((*IDS[:7], 90, 91, 92), [], 30, ROOM) is NOTHING


def test_what_is_taken_over_is_a_copy(model):
    prefixes = kept(model, IDS)
    first = prefixes.past_of((*IDS, 50), [], 40, ROOM)
    model(torch.tensor([[50, 51, 52]]), first.cache)
    second = prefixes.past_of((*IDS, 50), [], 40, ROOM)
    assert second.cache.length == 20
    for mine, theirs in zip(second.cache.layer(0), cache_of(model, IDS).layer(0), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sequences_still_running_lend_their_beginnings_too(model):
    running = Held.of(Past((), IDS, cache_of(model, IDS)))
    assert Prefixes().past_of((*IDS[:14], 90), [running], 40, ROOM).ids == IDS[:14]


def test_the_least_recently_used_make_way_first(model):
    one, two = IDS, tuple(range(40, 60))
    prefixes = kept(model, one, two)
    prefixes.past_of((*one, 90), [], 40, ROOM)  # used again
    prefixes.shrink_to(prefixes.kept_bytes - 1)
    assert prefixes.past_of((*one, 90), [], 40, ROOM) is not NOTHING
    assert prefixes.past_of((*two, 90), [], 40, ROOM) is NOTHING
    prefixes.shrink_to(0)
    assert prefixes.kept_bytes == 0


def test_a_longer_one_takes_the_place_of_its_beginning(model):
    prefixes = kept(model, IDS[:10], IDS)
    assert prefixes.kept_bytes == cache_of(model, IDS).copy(20).allocated_bytes


def test_a_cache_never_grows_beyond_what_was_promised(model):
    past = kept(model, IDS).past_of((*IDS, 50), [], 33, ROOM)
    for _ in range(13):
        model(torch.tensor([[50]]), past.cache)
        assert past.cache.allocated_bytes <= 33 * past.cache.position_bytes
    assert past.cache.length == 33


def test_where_both_have_no_room_the_kept_one_is_handed_over(model):
    prefixes = kept(model, IDS)
    past = prefixes.past_of((*IDS[:14], 90, 91), [], 33, prefixes.kept_bytes - 1)
    assert prefixes.kept_bytes == 0
    assert past.ids == IDS[:14] and past.cache.length == 14
    assert past.cache.allocated_bytes == 14 * past.cache.position_bytes
    for mine, theirs in zip(past.cache.layer(1), cache_of(model, IDS[:14]).layer(1), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_others_make_way_before_the_one_that_is_wanted(model):
    prefixes = kept(model, IDS, tuple(range(40, 60)))
    past = prefixes.past_of((*IDS, 90), [], 33, prefixes.kept_bytes // 2)
    assert past.ids == IDS and prefixes.past_of((*IDS, 90), [], 33, ROOM).ids == IDS


def test_keeping_takes_no_memory_beside_what_the_sequence_had(model):
    cache = cache_of(model, IDS)  # with room for 256 positions
    before = cache.allocated_bytes
    prefixes = Prefixes()
    prefixes.keep(Past((), IDS, cache))
    assert prefixes.kept_bytes == cache.allocated_bytes == 20 * cache.position_bytes < before
