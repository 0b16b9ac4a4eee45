"""Laws of the forward pass on tiny models of every family; parity of whole runs is in tests/parity."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM, RMSNorm, _positions
from decodescope.model.kv_cache import KVCache
from decodescope.model.linear import Matrix
from families import BY_NAME, FAMILIES, VOCABULARY

EVERY = pytest.mark.parametrize("name", [family.name for family in FAMILIES])
LENGTH = 24  # beyond every window of the tiny families
LAYERS = 3


@pytest.fixture(scope="module")
def models(tiny_folders: dict[str, Path]) -> dict[str, CausalLM]:
    return {name: load_model(folder)[0] for name, folder in tiny_folders.items()}


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def in_chunks(
    model: CausalLM, ids: Tensor, sizes: list[int], cache: KVCache, padding: Tensor | None = None
) -> Tensor:
    parts = [model(part, cache, padding, every_logit=True) for part in torch.split(ids, sizes, dim=1)]
    return torch.cat(parts, dim=1)


@EVERY
@settings(max_examples=8, derandomize=True, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
def test_cached_equals_uncached_for_any_chunking(models, name, cuts):
    model, ids = models[name], random_ids(1, LENGTH)
    edges = [0, *sorted(cuts), LENGTH]
    cache = KVCache(LAYERS)
    found = in_chunks(model, ids, [b - a for a, b in pairwise(edges)], cache)
    assert cache.length == LENGTH
    assert_same(found, model(ids, every_logit=True))


@EVERY
def test_token_by_token_equals_uncached(models, name):
    ids = random_ids(2, LENGTH)
    assert_same(in_chunks(models[name], ids, [1] * LENGTH, KVCache(LAYERS)), models[name](ids, every_logit=True))


@EVERY
def test_a_fork_and_its_parent_go_on_as_straight_runs(models, name):
    model, start = models[name], random_ids(1, 9)
    here, there = random_ids(1, 8, seed=1), random_ids(1, 8, seed=2)
    parent = KVCache(LAYERS)
    model(start, parent)
    child = parent.fork()
    one, two = [], []
    for i in range(8):  # in turns, so that one writing over the other would show
        one.append(model(here[:, i : i + 1], parent))
        two.append(model(there[:, i : i + 1], child))
    for found, end in ((one, here), (two, there)):
        straight = model(torch.cat((start, end), dim=1), every_logit=True)[:, 9:]
        assert_same(torch.cat(found, dim=1), straight)


@EVERY
def test_a_truncated_cache_goes_on_as_if_the_rest_had_never_been(models, name):
    model, ids, other = models[name], random_ids(1, LENGTH), random_ids(1, 7, seed=5)
    cache = KVCache(LAYERS)
    model(ids, cache)
    cache.truncate(10)
    found = model(other, cache, every_logit=True)
    assert_same(found, model(torch.cat((ids[:, :10], other), dim=1), every_logit=True)[:, 10:])


@EVERY
def test_a_left_padded_row_equals_the_row_alone(models, name):
    model, lengths, new = models[name], [3, 14, 8, 1], 6
    rows = [random_ids(n + new, seed=n) for n in lengths]
    padding = torch.tensor([max(lengths) - n for n in lengths])
    padded = torch.stack(
        [torch.cat((torch.zeros(int(pad), dtype=torch.long), row)) for pad, row in zip(padding, rows, strict=True)]
    )
    uncached = model(padded, None, padding, every_logit=True)
    cached = in_chunks(model, padded, [5, 9] + [1] * new, KVCache(LAYERS), padding)
    assert torch.isfinite(uncached).all() and torch.isfinite(cached).all()
    for i, row in enumerate(rows):
        alone = model(row[None], every_logit=True)[0]
        assert_same(uncached[i, padding[i] :], alone)
        assert_same(cached[i, padding[i] :], alone)


def test_positions_count_from_each_rows_first_token():
    """Rotary scores hide a shift of a whole row, so the logits alone would not show it."""
    padding = torch.tensor([0, 1, 4])
    assert _positions(3, 2, padding, padding.device).tolist() == [[2, 3, 4], [1, 2, 3], [0, 0, 0]]
    assert _positions(3, 2, None, padding.device).tolist() == [[2, 3, 4]]


@EVERY
def test_what_stands_in_the_padding_changes_nothing(models, name):
    model, padding = models[name], torch.tensor([4])
    ids, other = random_ids(1, 12), random_ids(1, 12)
    other[:, :4] = 96
    assert torch.equal(model(ids, None, padding), model(other, None, padding))


@EVERY
def test_a_later_token_never_changes_an_earlier_logit(models, name):
    model, ids = models[name], random_ids(1, LENGTH)
    other = ids.clone()
    other[0, 15:] = 3
    before, after = model(ids, every_logit=True), model(other, every_logit=True)
    assert_same(after[:, :15], before[:, :15])
    assert not torch.equal(after[:, 15], before[:, 15])


@EVERY
def test_the_last_logits_alone_are_the_last_row_of_all(models, name):
    model, ids = models[name], random_ids(2, LENGTH)
    last, every = model(ids), model(ids, every_logit=True)
    assert (last.shape, every.shape) == ((2, 1, VOCABULARY), (2, LENGTH, VOCABULARY))
    assert_same(last, every[:, -1:])


def test_logits_of_the_prompt_are_never_made_unasked(models):
    model, seen = models["qwen2-gqa"], []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    try:
        model(random_ids(2, LENGTH), KVCache(LAYERS))
        model(random_ids(2, LENGTH), every_logit=True)
    finally:
        hook.remove()
    assert seen == [(2, 1, 32), (2, LENGTH, 32)]


@EVERY
def test_in_bfloat16_the_logits_of_a_prompt_are_transformers_own_bit_by_bit(tiny_folders, name):
    ours, _ = load_model(tiny_folders[name], "bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_folders[name], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ids = random_ids(1, 30)
    with torch.inference_mode():
        expected = theirs(ids).logits
    assert torch.equal(ours(ids, KVCache(LAYERS), every_logit=True), expected)


@EVERY
def test_in_float16_only_the_matrices_are_rounded(tiny_folders, name):
    """Everything else is float32: the logits are those of a float32 model with such matrices, and none overflows."""
    ours, exact = load_model(tiny_folders[name], "float16")[0], load_model(tiny_folders[name])[0]
    for module in exact.modules():
        if isinstance(module, Matrix):
            module.hold(module[:].half().float())
    for ids in (random_ids(1, 30), random_ids(3, 4)):
        found = ours(ids, KVCache(LAYERS), every_logit=True)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact(ids, every_logit=True), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_the_papers_within_the_dtypes_rounding(dtype):
    norm = RMSNorm(64, 1e-6)
    random = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(64, generator=random))
    x = (torch.randn(3, 64, generator=random) * 200).to(dtype)  # squares overflow float16
    wide = x.double()
    expected = norm.weight.to(dtype).double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    norm.weight.data = norm.weight.data.to(dtype)
    torch.testing.assert_close(norm(x).double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def scaled_head(model: CausalLM) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.001, requires_grad=False)


def wrong_epsilon(model: CausalLM) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-3


def stretched_positions(model: CausalLM) -> None:
    model.rope_frequencies = model.rope_frequencies * 1.01


def shifted_keys(model: CausalLM) -> None:
    """Keys one position late, queries in place: the off-by-one of a cache that counts from 1."""
    for block in model.model.layers:
        block.self_attn.k_proj.register_forward_hook(lambda _, __, k: k.roll(1, dims=1))


def neighbouring_pairs(model: CausalLM) -> None:
    """The rotary pairs of llama.cpp's files (2i, 2i + 1) taken for (i, i + d/2)."""
    for block in model.model.layers:
        for part in (block.self_attn.q_proj, block.self_attn.k_proj):
            order = torch.arange(part.weight.shape[0]).view(-1, 4, 2).transpose(1, 2).flatten()
            part.weight = torch.nn.Parameter(part.weight[order], requires_grad=False)


def no_key_bias(model: CausalLM) -> None:
    for block in model.model.layers:
        block.self_attn.k_proj.bias = None


def no_window(model: CausalLM) -> None:
    model.config = replace(model.config, windows=())


PLANTED: list[tuple[str, Callable[[CausalLM], None]]] = [
    ("qwen2-gqa", scaled_head), ("qwen2-gqa", wrong_epsilon), ("llama-gqa", stretched_positions),
    ("llama-gqa", shifted_keys), ("llama-gqa", neighbouring_pairs), ("qwen2-mqa", no_key_bias),
    ("mistral-window", no_window), ("qwen2-window", no_window),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plant"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_breaks_parity(tiny_folders, name, plant):
    model, _ = load_model(tiny_folders[name])
    ids = random_ids(1, 30)
    expected = BY_NAME[name].reference()(ids).logits
    assert_same(model(ids, every_logit=True), expected, atol=1e-4)
    plant(model)
    with pytest.raises(AssertionError):
        assert_same(model(ids, every_logit=True), expected, atol=1e-4)
