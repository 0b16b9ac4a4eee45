"""Laws of looking: it changes nothing, sees every value once, sums it up rightly, and stays within its budget."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import prompt_ids, run, sizes, unmasked

from decodescope.analysis.departure import first_departure
from decodescope.errors import InputError
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.observe.recording import Recording, Watch
from decodescope.observe.selection import places, select_layers
from decodescope.probe import SITES
from decodescope.trace.site_records import SiteSummary, address
from site_references import Everything

DTYPES = ["float32", "bfloat16", "float16"]
LENGTH = 21  # beyond every window of the tiny families
ALL = ("*",)
GOLDEN = 0.6180339887498949


@pytest.fixture(scope="module")
def models(tiny_folders) -> dict[str, CausalLM]:
    return {name: load_model(folder)[0] for name, folder in tiny_folders.items()}


@pytest.fixture
def model(models, family) -> CausalLM:
    return models[family.name]


def assert_same_cache(one: KVCache, other: KVCache, layers: int) -> None:
    assert one.length == other.length
    for layer in range(layers):
        assert all(torch.equal(a, b) for a, b in zip(one.layer(layer), other.layer(layer), strict=True))


# --- looking changes nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_looking_changes_no_bit_of_logits_and_cache(tiny_folders, family, dtype):
    """Every site alone and all together, summed up and kept: prompt in one pass and in chunks, and a token."""
    model, _ = load_model(tiny_folders[family.name], dtype)
    prompt, alone = prompt_ids(LENGTH), {site: [site] for site, _ in places(model.config)}
    for chunk, watched in ((512, [ALL]), (11, [ALL, *alone.values()])):
        plain = run(model, prompt, steps=2, prefill_chunk=chunk)
        for sites in watched:
            seen = run(model, prompt, Watch(sites, sites), steps=2, prefill_chunk=chunk)
            assert seen.recording.summaries and seen.ids == plain.ids
            assert all(torch.equal(a, b) for a, b in zip(seen.logits, plain.logits, strict=True))
            assert_same_cache(seen.cache, plain.cache, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_looking_changes_no_bit_of_any_position_of_a_padded_batch(tiny_folders, family, dtype):
    model, _ = load_model(tiny_folders[family.name], dtype)
    ids, padding = torch.tensor([prompt_ids(LENGTH, seed) for seed in range(3)]), torch.tensor([0, 4, 9])
    plain, looked = KVCache(3), KVCache(3)
    for part in ids.split([13, 6, 1, 1], dim=1):
        expected = model(part, plain, padding, every_logit=True)
        assert torch.equal(model(part, looked, padding, every_logit=True, tap=Everything(model.config)), expected)
    assert_same_cache(plain, looked, 3)


# --- every value, once


@pytest.mark.parametrize("every_logit", [False, True])
def test_each_listed_site_fires_once_per_layer_and_pass_with_its_shape_and_nothing_else_does(model, every_logit):
    for rows in (1, 2):
        cache, ids = KVCache(3), torch.tensor([prompt_ids(LENGTH, seed) for seed in range(rows)])
        for T in (13, 7, 1):
            tap = Everything(model.config)
            start = cache.length
            model(ids[:, start : start + T], cache, every_logit=every_logit, tap=tap)
            assert sorted(tap.fired, key=str) == sorted(places(model.config), key=str)
            shapes = {place: tuple(value.shape) for place, value in tap.values.items()}
            assert shapes == sizes(model, rows, T, start + T, every_logit)


def test_a_value_a_model_does_not_have_is_never_recorded(models):
    without, having = models["llama-gqa"], models["qwen3-gqa"]
    assert not {"q_norm", "k_norm"} & {site for site, _ in places(without.config)}
    assert {"q_norm", "k_norm"} <= {site for site, _ in places(having.config)}
    with pytest.raises(InputError, match="No site is called"):
        Recording(without.config, Watch(["q_norm"]))


def test_a_summary_for_every_site_and_step_in_the_order_of_computation(model):
    seen = run(model, prompt_ids(LENGTH), Watch(summarise=ALL), steps=3).recording
    expected = [(step, layer, site) for step in range(3) for site, layer in places(model.config)]
    assert [(each.step, each.layer, each.site) for each in seen.summaries] == expected
    shapes = {
        0: sizes(model, 1, LENGTH, LENGTH),
        1: sizes(model, 1, 1, LENGTH + 1),
        2: sizes(model, 1, 1, LENGTH + 2),
    }
    for each in seen.summaries:
        assert each.shape == shapes[each.step][each.site, each.layer]
        assert each.recomputed == (each.site in ("scores", "pattern"))
        assert each.dtype == "float32"
    assert seen.summaries_of(1) == [each for each in seen.summaries if each.step == 1]
    assert seen.first_nonfinite is None


def test_the_order_of_computation_is_that_of_the_table(model):
    sites = [site for site, layer in places(model.config) if layer in (None, 0)]
    assert sites == [site.name for site in SITES if site.name in sites]


# --- what is kept and what is summed up


@pytest.mark.parametrize(
    "limits", [{}, {"prefill_chunk": 6}, {"use_cache": False}, {"every_logit": True}], ids=str
)
def test_what_is_kept_is_what_the_pass_computed(model, limits):
    prompt = prompt_ids(LENGTH)
    seen = run(model, prompt, Watch(ALL), steps=2, **limits)
    cache = KVCache(3) if limits.get("use_cache", True) else None
    passes = [prompt, seen.ids[:1]] if cache else [prompt, prompt + seen.ids[:1]]
    for step, ids in enumerate(passes):
        tap = Everything(model.config)
        model(torch.tensor([ids]), cache, tap=tap, every_logit=limits.get("every_logit", False))
        for place, value in tap.values.items():
            kept = seen.recording[address(*place)][step]
            assert kept.shape == value[0].shape
            torch.testing.assert_close(kept, value[0], atol=2e-4, rtol=1e-5)


def expected_statistics(model: CausalLM, place, value: torch.Tensor, first: int) -> dict[str, float]:
    """The figures of a fingerprint by torch in float64, from the whole value [T, D], [H, T, d]..."""
    plain = unmasked(model, place, value.double())
    weights = 1.0
    for axis, size in enumerate(value.shape):
        start = first if axis == value.ndim - 2 else 0
        index = torch.arange(start, start + size).double() + 1
        weights = weights * ((index * GOLDEN).frac() * 2 - 1).view(-1, *[1] * (value.ndim - 1 - axis))
    return dict(
        count=plain.numel(), mean=float(plain.mean()), std=float(plain.std(correction=0)), min=float(plain.min()),
        max=float(plain.max()), l2=float(plain.norm()), sum=float(plain.sum()),
        signature=float((plain * unmasked(model, place, weights.expand(value.shape))).sum()),
        zeros=float((plain == 0).double().mean()), nonfinite=int((~plain.isfinite()).sum()),
    )  # fmt: skip


def assert_figures(found: SiteSummary, expected: dict[str, float]) -> None:
    noise = 1e-12 * (expected["l2"] * math.sqrt(expected["count"]) + 1)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12, abs=noise, nan_ok=True), name


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        ("float32", {}),
        ("float32", {"use_cache": False}),
        ("bfloat16", {"prefill_chunk": 6}),
        ("float16", {"prefill_chunk": 6}),
    ],
    ids=str,
)
def test_statistics_are_torchs_in_float64_of_the_unmasked_entries(tiny_folders, family, dtype, limits):
    model, _ = load_model(tiny_folders[family.name], dtype)
    seen = run(model, prompt_ids(LENGTH), Watch(ALL, ALL), steps=2, **limits).recording
    for each in seen.summaries:
        value = seen[address(each.site, each.layer)][each.step]
        if each.site in ("scores", "pattern"):
            assert (each.dtype, value.dtype) == ("float32", torch.float32)
        else:
            assert each.dtype == str(model.dtype).removeprefix("torch.") == str(value.dtype).removeprefix("torch.")
        assert each.shape == (1, *value.shape)
        stop = LENGTH + each.step
        assert_figures(each, expected_statistics(model, (each.site, each.layer), value, stop - value.shape[-2]))


@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_chunks_of_a_prompt_are_summed_up_as_one_pass(model, chunk):
    prompt = prompt_ids(LENGTH)
    whole, parts = (
        run(model, prompt, Watch(summarise=ALL), prefill_chunk=size).recording.summaries for size in (512, chunk)
    )
    assert [replace(a, **figures(b)) for a, b in zip(whole, parts, strict=True)] == parts
    departure, distance = first_departure(list(zip(parts, whole, strict=True)), 1e-5)
    assert departure is None and distance > 0


def figures(summary: SiteSummary) -> dict[str, float]:
    names = ("mean", "std", "min", "max", "l2", "sum", "signature")
    return {name: getattr(summary, name) for name in names}


# --- budget, steps, positions


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(0, 120_000), chunk=st.sampled_from([512, 7]), every=st.booleans())
def test_the_budget_is_never_exceeded_and_what_was_dropped_is_listed(models, budget, chunk, every):
    model, prompt = models["qwen3-gqa"], prompt_ids(LENGTH)
    full = {
        (step, place): math.prod(shape) * 4
        for step, (T, S) in enumerate([(LENGTH, LENGTH), (1, LENGTH + 1)])
        for place, shape in sizes(model, 1, T, S, every).items()
    }
    watch = Watch(ALL, budget_bytes=budget)
    seen = run(model, prompt, watch, steps=2, prefill_chunk=chunk, every_logit=every).recording
    kept = {
        (step, place): tensor.nbytes
        for place in seen.kept.places()
        for step, tensor in seen[address(*place)].items()
    }
    assert sum(kept.values()) == seen.kept.bytes <= budget
    assert all(full[each] == size for each, size in kept.items())  # whole, or not at all
    dropped = {(gone.step, (gone.site, gone.layer)): gone.bytes for gone in seen.dropped}
    assert len(dropped) == len(seen.dropped)
    assert {**kept, **dropped}.keys() == full.keys() and not kept.keys() & dropped.keys()
    for each, size in dropped.items():
        # A pattern that arrives in chunks is narrower than the whole until its last one.
        assert size == full[each], each


def test_nothing_is_dropped_where_all_fits_and_all_where_nothing_does(models):
    model = models["llama-gqa"]
    assert run(model, prompt_ids(9), Watch(ALL)).recording.dropped == []
    nothing = run(model, prompt_ids(9), Watch(ALL, budget_bytes=0), steps=1).recording
    assert {(gone.site, gone.layer) for gone in nothing.dropped} == set(places(model.config))
    with pytest.raises(InputError, match="cannot be -1 bytes"):
        Watch(ALL, budget_bytes=-1)


def test_only_the_chosen_steps_are_looked_at(models):
    seen = run(models["qwen2-gqa"], prompt_ids(9), Watch(ALL, ALL, steps={0, 2}), steps=4).recording
    assert sorted({each.step for each in seen.summaries}) == [0, 2]
    assert list(seen["layers.2.up"]) == [0, 2]
    assert len(seen["embed"]) == 2 and seen["embed"][2].shape == (1, 32)


@pytest.mark.parametrize(
    "limits", [{}, {"prefill_chunk": 6}, {"use_cache": False}, {"every_logit": True}], ids=str
)
@pytest.mark.parametrize("chosen", [{0}, {3, 8, 20}, {5, 6, 21}, {LENGTH - 1}, {40}], ids=str)
@pytest.mark.parametrize("name", ["qwen3-gqa", "mistral-window"])
def test_positions_choose_the_rows_that_stand_there(models, name, limits, chosen):
    model = models[name]
    whole = run(model, prompt_ids(LENGTH), Watch(ALL), steps=2, **limits).recording
    some = run(model, prompt_ids(LENGTH), Watch(ALL, positions=chosen), steps=2, **limits).recording
    for place in places(model.config):
        for step, value in whole[address(*place)].items():
            stop = LENGTH + step
            rows = [row for row in range(value.shape[-2]) if stop - value.shape[-2] + row in chosen]
            if rows:
                kept = some[address(*place)][step]
                assert kept.shape == value[..., rows, :].shape
                torch.testing.assert_close(kept, value[..., rows, :], atol=1e-5, rtol=1e-4)
            else:
                assert place not in some.kept.places() or step not in some[address(*place)]


def test_what_was_not_kept_is_refused_by_name(models):
    seen = run(models["qwen2-gqa"], prompt_ids(5), Watch(["layers.1.z"])).recording
    with pytest.raises(InputError, match=r"keeps nothing of layers\.0\.z; it keeps: layers\.1\.z"):
        seen["layers.0.z"]


def test_a_kept_tensor_is_a_copy_that_may_be_changed_and_differentiated(models):
    seen = run(models["qwen2-gqa"], prompt_ids(5), Watch(["layers.1.resid_post"])).recording
    tensor = seen["layers.1.resid_post"][0]
    assert not tensor.is_inference()
    tensor.requires_grad_(True).square().sum().backward()
    assert torch.equal(tensor.grad, 2 * tensor.detach())


# --- what is recomputed


def test_rows_recomputed_in_blocks_are_the_rows_recomputed_at_once(models, monkeypatch):
    model = models["mistral-window"]
    watch = Watch(["scores", "pattern"], ["scores", "pattern"])
    whole = run(model, prompt_ids(LENGTH), watch, prefill_chunk=9).recording
    monkeypatch.setattr("decodescope.probe.SHOWN_BLOCK", 200)
    parts = run(model, prompt_ids(LENGTH), watch, prefill_chunk=9).recording
    for site in ("layers.0.scores", "layers.2.pattern"):
        torch.testing.assert_close(parts[site][0], whole[site][0], atol=1e-6, rtol=1e-6)
    assert first_departure(list(zip(parts.summaries, whole.summaries, strict=True)), 1e-6)[0] is None
    assert parts.reconstruction_error < 1e-5


def test_a_pattern_is_a_share_of_what_may_be_seen_and_its_error_is_told(model):
    seen = run(model, prompt_ids(LENGTH), Watch(["pattern"]), prefill_chunk=8).recording
    for layer in range(3):
        for value in seen[f"layers.{layer}.pattern"].values():
            assert float((value.sum(-1) - 1).abs().max()) < 1e-6
            share = unmasked(model, ("pattern", layer), value).sum()
            assert float(share) == pytest.approx(value.shape[0] * value.shape[1], rel=1e-6)
    assert 0 < seen.reconstruction_error < 1e-5
    assert run(model, prompt_ids(5), Watch(["z"])).recording.reconstruction_error is None


@pytest.mark.parametrize("word", ["4", "-5", "2-1", "0-4", "x", "", "--1", "²", "9" * 5000])
def test_a_layer_that_is_none_is_refused(models, word):
    config = replace(models["qwen2-gqa"].config, num_hidden_layers=4)
    assert select_layers(config, ["0", "-1"]) == {0, 3} and select_layers(config, ()) == {0, 1, 2, 3}
    with pytest.raises(InputError, match="from 0 to 3"):
        select_layers(config, [word])
