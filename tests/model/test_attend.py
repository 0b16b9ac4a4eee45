"""Which kernel attends, and runs over caches of every format: what is held decides the numbers, never the way there."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.model import attend as room_of_attend
from decodescope.model import kernels
from decodescope.model.attend import attend
from decodescope.model.cache_formats import FORMATS, Held, Stored, has_scales
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.model.mask import Mask
from decodescope.observe.recording import Recording, Watch
from families import VOCABULARY, Family

LAYERS, LENGTH = 3, 40
compiled = pytest.mark.skipif(
    kernels.available().instructions is None, reason="needs a C compiler; ends where there is one"
)
SHAPE = dict(num_key_value_heads=2, head_dim=16)  # heads of a whole register: ours can read them
WIDE = {
    "qwen3": Family("qwen3", "Qwen3", SHAPE),
    "window": Family("window", "Mistral", {**SHAPE, "sliding_window": 11}),
}
# How far the logits of these models (up to 3.2) may be from those of an exact cache; about 1.5 times what was seen.
ERROR = {"float32": 1e-5, "bfloat16": 0.03, "float16": 0.004, "float8": 0.3, "int8": 0.07}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folders: dict[str, Path] = {name: tmp_path_factory.mktemp(name) for name in WIDE}
    for name, folder in folders.items():
        WIDE[name].save(folder)
    return {name: load_model(folder)[0] for name, folder in folders.items()}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel from the first position on."""
    monkeypatch.setattr(room_of_attend, "_FROM", dict.fromkeys(FORMATS.values(), 1))


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def in_chunks(
    model: CausalLM, ids: Tensor, sizes: list[int], cache: KVCache, padding: Tensor | None = None
) -> Tensor:
    parts = [model(part, cache, padding, every_logit=True) for part in torch.split(ids, sizes, dim=1)]
    return torch.cat(parts, dim=1)


def past(positions: int, dtype: torch.dtype = torch.float32, rows: int = 1) -> Held:
    return Held((Stored(torch.randn(rows, 2, positions, 64).to(dtype)),))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_short_caches_are_attended_by_torch_bit_by_bit_and_long_ones_by_us(dtype):
    q, long = torch.randn(1, 14, 1, 64).to(dtype), room_of_attend._FROM[dtype]
    for positions in (long - 1, long):
        keys, values = past(positions, dtype), past(positions, dtype)
        found = attend(q, keys, values, Mask())
        theirs = F.scaled_dot_product_attention(q, keys.plain(), values.plain(), enable_gqa=True)
        assert found.dtype == dtype
        assert torch.equal(found, theirs) == (positions < long)
        torch.testing.assert_close(found, theirs, atol=4 * torch.finfo(dtype).eps, rtol=0)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_inputs_and_fresh_ones_are_torchs(dtype):
    many, few = torch.randn(1, 14, 9, 64).to(dtype), torch.randn(1, 14, 2, 64).to(dtype)
    keys, values = past(2000, dtype), past(2000, dtype)
    plain = keys.plain(), values.plain()
    assert torch.equal(
        attend(many, keys, values, Mask()), F.scaled_dot_product_attention(many, *plain, enable_gqa=True)
    )
    fresh = past(2, dtype), past(2, dtype)
    expected = F.scaled_dot_product_attention(
        few, *(each.plain() for each in fresh), is_causal=True, enable_gqa=True
    )
    assert torch.equal(attend(few, *fresh, Mask(is_causal=True)), expected)
    no_cache = attend(few, fresh[0].plain(), fresh[1].plain(), Mask(is_causal=True))
    assert torch.equal(no_cache, expected)


def test_on_other_devices_torch_attends():
    q, keys = torch.empty(1, 4, 1, 64, device="meta"), Held((Stored(torch.empty(1, 2, 9000, 64, device="meta")),))
    assert attend(q, keys, keys, Mask()).device.type == "meta"


@EVERY_FORMAT
@pytest.mark.parametrize("model", WIDE)
@settings(
    max_examples=6, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
def test_cached_equals_uncached_within_the_formats_error_for_any_chunking(models, ours, model, name, cuts):
    ids, edges = ids_of(1, LENGTH), [0, *sorted(cuts), LENGTH]
    cache = KVCache(LAYERS, FORMATS[name])
    found = in_chunks(models[model], ids, [b - a for a, b in pairwise(edges)], cache)
    torch.testing.assert_close(found, models[model](ids, every_logit=True), atol=ERROR[name], rtol=0)
    whole = models[model](ids, KVCache(LAYERS, FORMATS[name]), every_logit=True)
    torch.testing.assert_close(found, whole, atol=ERROR[name], rtol=0)


@EVERY_FORMAT
def test_padded_rows_are_the_rows_alone_in_every_format(models, ours, name):
    lengths, new, held = [5, 17, 9], 6, FORMATS[name]
    rows = [ids_of(length + new, seed=length) for length in lengths]
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padded = torch.stack([F.pad(row, (int(pad), 0)) for pad, row in zip(padding, rows, strict=True)])
    found = in_chunks(models["qwen3"], padded, [max(lengths)] + [1] * new, KVCache(LAYERS, held), padding)
    for i, row in enumerate(rows):
        alone = in_chunks(models["qwen3"], row[None], [lengths[i]] + [1] * new, KVCache(LAYERS, held))[0]
        torch.testing.assert_close(found[i, padding[i] :], alone, atol=ERROR[name], rtol=0)


@compiled
@EVERY_FORMAT
def test_rows_behind_one_past_go_on_as_straight_runs_and_copy_nothing_of_it(models, ours, name, monkeypatch):
    model, start, held = models["qwen3"], ids_of(1, 20), FORMATS[name]
    ends = torch.stack([ids_of(8, seed=seed) for seed in (1, 2, 3)])
    parent = KVCache(LAYERS, held)
    model(start, parent)
    rows = parent.fork()
    straight = [KVCache(LAYERS, held) for _ in ends]
    for cache in straight:
        model(start, cache)
    with monkeypatch.context() as patch:
        patch.setattr(Held, "plain", lambda _: pytest.fail("joined"))
        found = in_chunks(model, ends, [1] * 8, rows)
    # Three rows at once differ from one in the last bit, and a number in a byte may then be its neighbour.
    within = ERROR[name] if has_scales(held) else 1e-5
    for i, cache in enumerate(straight):
        expected = in_chunks(model, ends[i : i + 1], [1] * 8, cache)[0]
        torch.testing.assert_close(found[i], expected, atol=within, rtol=0)
        pastless = in_chunks(model, ends[i : i + 1], [1] * 8, KVCache(LAYERS, held))[0]
        assert (pastless - found[i]).abs().max() > 4 * within, "a lost past would be seen"


@EVERY_FORMAT
def test_a_truncated_cache_goes_on_as_if_the_rest_had_never_been(models, ours, name):
    model, ids, other = models["qwen3"], ids_of(1, 30), ids_of(1, 5, seed=5)
    cut, straight = KVCache(LAYERS, FORMATS[name]), KVCache(LAYERS, FORMATS[name])
    for cache in (cut, straight):  # alike, since keys in bytes are held less the centre of the first ones
        model(ids[:, :12], cache)
    model(ids[:, 12:], cut)
    cut.truncate(12)
    sizes = [1] * 5
    assert torch.equal(in_chunks(model, other, sizes, cut), in_chunks(model, other, sizes, straight))


@EVERY_FORMAT
def test_a_tap_sees_what_is_held_and_changes_nothing(models, ours, name):
    model, ids = models["qwen3"], ids_of(1, LENGTH)
    plain, looked, errors = KVCache(LAYERS, FORMATS[name]), KVCache(LAYERS, FORMATS[name]), []
    for step, (first, last) in enumerate(pairwise((0, 30, 31, 32, 36))):
        recording = Recording(model.config, Watch(("layers.*.pattern",), ()))
        tap = recording.begin(step, first, last)
        seen = model(ids[:, first:last], looked, tap=tap)
        recording.end()
        errors.append(recording.reconstruction_error)
        assert torch.equal(seen, model(ids[:, first:last], plain))
    assert max(errors) < 1e-5


@compiled
def test_a_wrong_format_is_found(models, ours):
    """int8 without the scales of the values: the laws above would see it."""
    ids = ids_of(1, LENGTH)
    cache = KVCache(LAYERS, torch.int8)
    models["qwen3"](ids[:, :-1], cache)
    with torch.inference_mode():
        for layer in range(LAYERS):
            for part in cache.held(layer)[1].stretches:
                part.tensors[1].mul_(1.5)
    found = models["qwen3"](ids[:, -1:], cache)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, models["qwen3"](ids), atol=ERROR["int8"], rtol=0)
