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
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        cache, rows = self.pick(index)
        self.pairs.append((cache.fork(), [list(row) for row in rows]))

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
                assert torch.equal(keys, entries(rows, layer))
                assert torch.equal(values, entries(rows, layer, values=True))
            assert cache.used_bytes == 2 * LAYERS * len(rows) * HEADS * SIZE * 8 * cache.length


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


def test_a_fork_costs_nothing_until_one_of_the_two_writes():
    parent = filled(5)
    child = parent.fork()
    assert child.layer(0)[0].data_ptr() == parent.layer(0)[0].data_ptr()
    append(child, 1)
    assert child.layer(0)[0].data_ptr() != parent.layer(0)[0].data_ptr()
    grandchild, length = child.fork(), child.length
    append(grandchild, 3)
    assert (parent.length, child.length, grandchild.length) == (5, length, length + 3)
