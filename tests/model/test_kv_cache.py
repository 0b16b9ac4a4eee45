"""The cache against a plain model of it: per batch row a list of position labels; forks never meet again."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodescope.model.kv_cache import KVCache

LAYERS, HEADS, SIZE = 2, 3, 2


def entries(labels: list[list[int]], layer: int, values: bool = False) -> torch.Tensor:
    """[B, K, T, d] in which every number is told by row's label, layer, kind, head and dimension."""
    base = torch.tensor(labels, dtype=torch.float64)[:, None, :, None] * 64 + layer * 32 + values * 16
    return base + torch.arange(HEADS)[:, None, None] * 4 + torch.arange(SIZE)


class Forks(RuleBasedStateMachine):
    """Any number of caches, forked from one another, each beside the rows of labels it ought to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[KVCache, list[list[int]]]] = [(KVCache(LAYERS), [[], []])]
        self.label = 0

    def pick(self, index: int) -> tuple[KVCache, list[list[int]]]:
        return self.pairs[index % len(self.pairs)]

    def new_labels(self, rows: int, count: int) -> list[list[int]]:
        self.label += count * rows
        return [[self.label - i * count - j for j in range(count)] for i in range(rows)]

    @rule(index=st.integers(0, 9), count=st.sampled_from([1, 1, 2, 7, 100, 260]))
    def append(self, index: int, count: int) -> None:
        cache, rows = self.pick(index)
        new = self.new_labels(len(rows), count)
        for layer in range(LAYERS):
            keys, values = cache.append(layer, entries(new, layer), entries(new, layer, values=True))
            whole = [row + more for row, more in zip(rows, new, strict=True)]
            assert torch.equal(keys, entries(whole, layer))
            assert torch.equal(values, entries(whole, layer, values=True))
        cache.advance(count)
        for row, more in zip(rows, new, strict=True):
            row.extend(more)

    @rule(index=st.integers(0, 9), count=st.sampled_from([1, 5, 300]))
    def fail_half_way(self, index: int, count: int) -> None:
        cache, rows = self.pick(index)
        new = self.new_labels(len(rows), count)
        cache.append(0, entries(new, 0), entries(new, 0))  # the other layers never come

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, index: int, share: float) -> None:
        cache, rows = self.pick(index)
        length = int(share * cache.length)
        cache.truncate(length)
        for row in rows:
            del row[length:]

    @precondition(lambda self: len(self.pairs) < 5)
    @rule(index=st.integers(0, 9), several=st.sampled_from([1, 1, 3]))
    def fork(self, index: int, several: int) -> None:
        """Of one row as that row, or as several that go on from it."""
        cache, rows = self.pick(index)
        copies = several if len(rows) == 1 and cache.length else 1
        self.pairs.append((cache.fork(), [list(row) for row in rows for _ in range(copies)]))

    @rule(index=st.integers(0, 9), order=st.sampled_from([[0], [1], [1, 0], [0, 1], [0, 0, 1]]))
    def keep_rows(self, index: int, order: list[int]) -> None:
        cache, rows = self.pick(index)
        if max(order) >= len(rows):
            return
        cache.keep_rows(order)
        rows[:] = [list(rows[i]) for i in order]

    @invariant()
    def each_cache_holds_its_rows(self) -> None:
        for cache, rows in self.pairs:
            assert cache.length == len(rows[0])
            assert cache.used_bytes <= cache.allocated_bytes
            if not cache.length:
                continue
            for layer in range(LAYERS):
                keys, values = cache.layer(layer)
                assert torch.equal(keys.expand(len(rows), -1, -1, -1), entries(rows, layer))
                assert torch.equal(values.expand(len(rows), -1, -1, -1), entries(rows, layer, values=True))
            assert cache.position_bytes == 2 * LAYERS * HEADS * SIZE * 8
            assert cache.used_bytes <= len(rows) * cache.position_bytes * cache.length
            assert cache.allocated_bytes == cache.own_bytes + cache.shared_bytes


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=60, stateful_step_count=25, derandomize=True, deadline=None)


def filled(positions: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> KVCache:
    cache = KVCache(4)
    append(cache, positions, dtype, batch)
    return cache


def append(cache: KVCache, positions: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> None:
    for layer in range(4):
        k, v = torch.randn(2, batch, 2, positions, 8, generator=torch.Generator().manual_seed(layer)).to(dtype)
        cache.append(layer, k, v)
    cache.advance(positions)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_used_bytes_follow_the_formula(dtype, width, batch):
    cache = filled(11, dtype, batch)
    assert cache.used_bytes == 2 * 4 * batch * 2 * 8 * width * 11
    cache.truncate(4)
    assert cache.used_bytes == 2 * 4 * batch * 2 * 8 * width * 4


def test_an_empty_cache_holds_nothing():
    cache = KVCache(4)
    assert (cache.length, cache.used_bytes, cache.allocated_bytes) == (0, 0, 0)
    with pytest.raises(ValueError, match="holds nothing"):
        cache.layer(0)


def test_room_grows_by_half_so_that_each_position_is_copied_a_bounded_number_of_times():
    cache, sizes = filled(1), []
    for _ in range(6000):
        append(cache, 1)
        if cache.allocated_bytes not in sizes:
            sizes.append(cache.allocated_bytes)
    per_position = cache.used_bytes // cache.length
    assert sizes[0] == 256 * per_position
    assert all(size % (256 * per_position) == 0 for size in sizes)
    assert len(sizes) < 12  # by whole blocks alone it would be 24
    assert sum(sizes[:-1]) < 3 * sizes[-1]
    assert cache.allocated_bytes <= 1.5 * cache.used_bytes + 256 * per_position


def test_truncating_never_reaches_beyond_what_is_there():
    cache = filled(5)
    for length in (6, -1):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(length)
    cache.truncate(5)
    assert cache.length == 5


def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was():
    cache = filled(5)
    before = [tuple(t.clone() for t in cache.layer(i)) for i in range(4)]
    noise = torch.ones(1, 2, 400, 8, dtype=torch.bfloat16)
    cache.append(0, noise, noise)
    assert cache.length == 5
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(cache.layer(layer)[0], keys) and torch.equal(cache.layer(layer)[1], values)
    append(cache, 2)
    assert torch.equal(cache.layer(0)[0][:, :, :5], before[0][0])


def test_a_fork_costs_what_it_adds_and_its_parent_goes_on_in_place():
    parent = filled(300)
    per_position, before = parent.position_bytes, parent.layer(0)[0].data_ptr()
    children = [parent.fork() for _ in range(100)]
    assert all(child.own_bytes == 0 for child in children)
    assert all(child.shared_bytes == 300 * per_position for child in children)
    for child in children:
        append(child, 3)
    append(parent, 1)
    assert parent.layer(0)[0].data_ptr() == before
    assert sum(child.own_bytes for child in children) == 100 * 32 * per_position
    assert all(child.used_bytes == 303 * per_position for child in children)


def test_whoever_writes_where_a_fork_looks_copies_first():
    parent = filled(5)
    child, kept = parent.fork(), [tuple(t.clone() for t in parent.layer(i)) for i in range(4)]
    parent.truncate(2)
    append(parent, 3)
    for layer, (keys, values) in enumerate(kept):
        assert torch.equal(child.layer(layer)[0], keys) and torch.equal(child.layer(layer)[1], values)
    assert not torch.equal(parent.layer(0)[0], kept[0][0])


def test_a_fork_cut_back_into_its_past_leaves_that_alone():
    parent = filled(6)
    child = parent.fork()
    append(child, 4)
    child.truncate(3)
    assert child.own_bytes == 0 and child.shared_bytes == 3 * child.position_bytes
    append(child, 2)
    assert torch.equal(child.layer(1)[0][:, :, :3], parent.layer(1)[0][:, :, :3])
    assert (parent.length, child.length) == (6, 5)


def test_the_fork_of_one_row_goes_on_as_several_in_the_memory_of_one_past():
    parent = filled(7)
    rows = parent.fork()
    append(rows, 2, batch=5)
    assert rows.layer(0)[0].shape[0] == 5
    assert rows.shared_bytes == parent.used_bytes
    assert all(torch.equal(row[:, :7], parent.layer(2)[0][0]) for row in rows.layer(2)[0])
    rows.keep_rows([4, 0])
    append(rows, 1, batch=2)
    assert rows.layer(0)[0].shape[0] == 2 and rows.shared_bytes == parent.used_bytes
