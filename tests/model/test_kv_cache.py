"""The cache against a plain model of it, in every format: per batch row a list of position labels; forks never meet
again."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodescope.model.cache_formats import FORMATS, Held
from decodescope.model.kv_cache import KVCache

LAYERS, HEADS, SIZE = 2, 3, 4
NUMBERS = torch.randn(
    8192, LAYERS, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)
# How far keys in bytes, held less their centre, may be from what they were: others are farther away.
NEAR = {torch.float8_e4m3fn: 0.5, torch.int8: 0.06}
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}
EVERY_FORMAT = pytest.mark.parametrize("held", [None, *FORMATS.values()], ids=str)


def rounded(values: torch.Tensor, held: torch.dtype | None) -> torch.Tensor:
    """What a format makes of values [..., d], position by position and head by head."""
    if held not in LARGEST:
        return values.to(held or values.dtype)
    scale = (values.float().abs().amax(-1, keepdim=True) / LARGEST[held]).clamp(min=1e-38)
    numbers = values.float() / scale
    return (numbers.round() if held == torch.int8 else numbers).to(held).float() * scale


def entries(labels: list[list[int]], layer: int, values: bool = False) -> torch.Tensor:
    """[B, K, T, d] in which every vector is told by row's label, layer, kind and head."""
    at = torch.tensor(labels, dtype=torch.long) % len(NUMBERS)  # B T
    return NUMBERS[at, layer, int(values)].transpose(1, 2)


class Forks(RuleBasedStateMachine):
    """Any number of caches, forked from one another, each beside the rows of labels it ought to hold."""

    held: torch.dtype | None = None
    position_bytes = 2 * LAYERS * HEADS * SIZE * 8

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[KVCache, list[list[int]]]] = [(KVCache(LAYERS, self.held), [[], []])]
        self.label = 0

    def assert_holds(self, found: torch.Tensor, rows: list[list[int]], layer: int, values: bool = False) -> None:
        exact, found = entries(rows, layer, values), found.expand(len(rows), -1, -1, -1)
        if self.held in NEAR and not values:
            assert ((found - exact).abs() <= NEAR[self.held]).all()
            return
        assert found.dtype == rounded(exact, self.held).dtype
        assert torch.equal(found, rounded(exact, self.held))

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
            self.assert_holds(keys.plain(), whole, layer)
            self.assert_holds(values.plain(), whole, layer, values=True)
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
                self.assert_holds(keys, rows, layer)
                self.assert_holds(values, rows, layer, values=True)
            assert cache.position_bytes == self.position_bytes
            assert cache.used_bytes <= len(rows) * cache.position_bytes * cache.length
            assert cache.allocated_bytes == cache.own_bytes + cache.shared_bytes


class ForksInHalf(Forks):
    held, position_bytes = torch.bfloat16, 2 * LAYERS * HEADS * SIZE * 2


class ForksInFloat8(Forks):
    held, position_bytes = torch.float8_e4m3fn, 2 * LAYERS * HEADS * (SIZE + 4)


class ForksInInt8(Forks):
    held, position_bytes = torch.int8, 2 * LAYERS * HEADS * (SIZE + 4)


def case(machine: type[Forks], examples: int) -> type:
    found = machine.TestCase
    found.settings = settings(max_examples=examples, stateful_step_count=25, derandomize=True, deadline=None)
    return found


TestForks = case(Forks, 60)
TestForksInHalf, TestForksInFloat8, TestForksInInt8 = (
    case(machine, 12) for machine in (ForksInHalf, ForksInFloat8, ForksInInt8)
)


def filled(
    positions: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1, held: torch.dtype | None = None
) -> KVCache:
    cache = KVCache(4, held)
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


@pytest.mark.parametrize(
    ("held", "vector_bytes"), list(zip(FORMATS.values(), (32, 16, 16, 12, 12), strict=True)), ids=str
)
def test_used_bytes_follow_the_formula_in_every_format(held, vector_bytes):
    cache = filled(11, torch.float32, 3, held)
    assert cache.position_bytes == 2 * 4 * 2 * vector_bytes
    assert cache.used_bytes == 3 * 11 * cache.position_bytes
    assert cache.allocated_bytes == 3 * 256 * cache.position_bytes
    measured = {
        tensor.data_ptr(): tensor for each in cache.held(0) for part in each.stretches for tensor in part.tensors
    }
    assert sum(tensor.untyped_storage().nbytes() for tensor in measured.values()) == cache.allocated_bytes // 4


@EVERY_FORMAT
def test_a_format_rounds_each_position_and_head_by_itself(held):
    exact = torch.randn(2, 3, 9, 16) * torch.logspace(-6, 6, 9)[:, None]
    cache = KVCache(1, held)
    for part in exact.split([4, 1, 4], dim=2):
        _, values = cache.append(0, part, part)
        cache.advance(part.shape[2])
    assert torch.equal(values.plain(), rounded(exact, held))
    assert torch.equal(values.float(), values.plain().float())
    assert (values.shape, values.device, values.positions) == (exact.shape, exact.device, 9)
    worst = ((values.float() - exact).abs() / exact.abs().amax(-1, keepdim=True)).max()
    within = {None: 0, torch.float32: 0, torch.float16: torch.inf}  # float16 overflows at 65504
    assert worst <= within.get(held, 2**-4 if held == torch.float8_e4m3fn else 2**-7)


@pytest.mark.parametrize(("held", "gain"), [(torch.float8_e4m3fn, 4), (torch.int8, 20)], ids=str)
def test_channels_that_are_large_everywhere_cost_keys_no_precision(held, gain):
    """As the biases of Qwen2.5 make them: beside them a scale alone would leave the other channels few steps."""
    exact = torch.randn(1, 2, 40, 64)
    exact[..., [3, 35]] += torch.tensor([200.0, -90.0])
    cache = KVCache(1, held)
    for part in exact.split([30] + [1] * 10, dim=2):
        keys, _ = cache.append(0, part, part)
        cache.advance(part.shape[2])
    error, alone = ((each - exact).square().mean().sqrt() for each in (keys.plain(), rounded(exact, held)))
    assert gain * error < alone


@pytest.mark.parametrize("held", LARGEST, ids=str)
@pytest.mark.parametrize("size", [1, 8, 24, 64, 80, 128])
def test_queries_that_face_the_held_keys_have_the_keys_products(held, size):
    q, exact = torch.randn(2, 4, 3, size), torch.randn(2, 4, 20, size) + 5
    keys, _ = KVCache(1, held).append(0, exact, exact)
    as_held = Held(keys.stretches).plain()  # no centre: the numbers times their scales
    products, expected = keys.facing(q) @ as_held.mT, q @ keys.plain().mT
    apart = products - expected
    torch.testing.assert_close(apart, apart[..., :1].expand_as(apart), atol=2e-4, rtol=0)


@pytest.mark.parametrize("held", LARGEST, ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_never_looks_like_a_number(held, fault):
    exact = torch.randn(1, 2, 3, 4)
    exact[0, 1, 1, 2] = fault
    for each in KVCache(1, held).append(0, exact, exact):
        broken = each.plain().isnan()
        assert broken[0, 1, 1].all() and int(broken.sum()) == 4


@pytest.mark.parametrize("held", LARGEST, ids=str)
def test_zeros_stay_zeros(held):
    keys, _ = KVCache(1, held).append(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    assert not keys.plain().any()


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
