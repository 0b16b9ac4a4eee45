"""Fingerprints of two runs: what is the same, what is not, and where the first difference stands."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.analysis.departure import Seen, compare_runs, first_departure, furthest
from decodescope.observe.statistics import Statistics, measure
from decodescope.trace.records import PromptToken, Run
from decodescope.trace.site_records import SiteSummary

RUN = Run(
    model="m", source="folder", path="p", revision=None, sha256="a", architecture="Qwen2ForCausalLM", dtype="float32",
    device="cpu", attention="sdpa", use_cache=True, prompt_text="", prompt_tokens=(), settings=(), stop_ids=(),
    stop_strings=(), max_new_tokens=1, kv_bytes_per_token=1, vocabulary=9, versions={"torch": "2"}, started_at="",
)  # fmt: skip


def summed(tensor: torch.Tensor, step: int = 0, layer: int | None = 0, site: str = "q") -> SiteSummary:
    found = Statistics(*measure([tensor[None]], 0)[0].tolist())
    return SiteSummary(
        step=step, layer=layer, site=site, shape=(1, *tensor.shape), dtype="float32", count=found.size, mean=found.mean,
        std=math.sqrt(found.m2 / found.size), min=found.min, max=found.max,
        l2=math.sqrt(found.m2 + found.mean**2 * found.size), sum=found.sum, signature=found.signature,
        zeros=found.zeros / found.size, nonfinite=found.nonfinite,
    )  # fmt: skip


def values(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (6, 4, 8)), generator=generator, dtype=torch.float64)


def seen(ids: tuple[int, ...], chosen: tuple[int, ...], sites: list[SiteSummary], **changes: object) -> Seen:
    tokens = tuple(PromptToken(i, each, "", "", "text") for i, each in enumerate(ids))
    return Seen(replace(RUN, prompt_tokens=tokens, **changes), chosen, sites)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9999), st.floats(1e-6, 0.5), st.sampled_from(["noise", "scale", "shift", "one"]))
def test_norm_deviation_and_sum_never_tell_more_than_the_true_error(seed, error, kind):
    there = values(seed)
    noise = {
        "noise": values(seed + 1), "scale": there, "shift": torch.ones_like(there),
        "one": torch.zeros_like(there).index_fill(0, torch.tensor([0]), 1.0),
    }[kind]  # fmt: skip
    here = there + noise * (error * there.norm() / noise.norm())
    one, other = summed(here.float()), summed(there.float())
    root = math.sqrt(other.count)
    assert abs(one.l2 - other.l2) / other.l2 <= error + 1e-6
    assert abs(one.std - other.std) * root / other.l2 <= error + 1e-6
    assert abs(one.sum - other.sum) / (root * other.l2) <= error + 1e-6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9999), st.integers(0, 2), st.data())
def test_an_exchange_of_heads_is_seen_by_the_signature_alone(seed, axis, data):
    there = values(seed)
    order = data.draw(st.permutations(range(there.shape[axis])).filter(lambda each: list(each) != sorted(each)))
    one, other = summed(there.index_select(axis, torch.tensor(order)).float()), summed(there.float())
    figure, distance = furthest(one, other)
    assert figure == "signature" and distance > 1e-4
    assert one.l2 == pytest.approx(other.l2) and (one.min, one.max) == (other.min, other.max)


def test_a_fingerprint_is_at_no_distance_from_itself_even_with_nan_in_it():
    for tensor in (values(1), torch.zeros(2, 3), values(1).index_fill(0, torch.tensor([2]), math.nan)):
        assert furthest(summed(tensor.float()), summed(tensor.float()))[1] == 0.0


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        ({"shape": (1, 6, 4, 9)}, "shape"),
        ({"nonfinite": 1}, "nonfinite"),
        ({"l2": math.nan}, "l2"),
        ({"max": math.inf}, "max"),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(change, figure):
    there = summed(values(3).float())
    assert furthest(replace(there, **change), there) == (figure, math.inf)


def test_something_instead_of_nothing_is_infinitely_far():
    assert furthest(summed(torch.ones(2, 3)), summed(torch.zeros(2, 3)))[1] == math.inf


def test_another_count_of_elements_is_infinitely_far():
    site = summed(values(1).float())
    assert furthest(site, replace(site, count=0)) == ("count", math.inf)


def test_the_first_departure_is_the_first_in_the_order_given_and_not_the_largest():
    good = [summed(values(i).float(), layer=i) for i in range(5)]
    bad = [*good[:2], replace(good[2], l2=good[2].l2 * 1.01), replace(good[3], l2=good[3].l2 * 9), good[4]]
    departure, largest = first_departure(list(zip(bad, good, strict=True)), 1e-3)
    assert departure is not None and (departure.layer, departure.figure) == (2, "l2")
    assert departure.distance == pytest.approx(0.01) and largest == 0.0
    departure, largest = first_departure(list(zip(bad, good, strict=True)), 0.1)
    assert departure is not None and departure.layer == 3 and largest == pytest.approx(0.01)


def test_ids_are_compared_before_any_site():
    site = summed(values(1).float())
    found = compare_runs(seen((1, 2, 3), (), [site]), seen((1, 9, 3), (), [summed(values(2).float())]), "d")
    assert (found.ids_part_at, found.compared, found.departure) == (1, 0, None)
    assert found.departs
    longer = compare_runs(seen((1, 2, 3), (), [site]), seen((1, 2), (), [site]), "d")
    assert longer.ids_part_at == 2


def test_steps_after_another_choice_are_not_compared():
    ours = [summed(values(step).float(), step=step) for step in range(4)]
    theirs = [*ours[:2], *(summed(values(9).float(), step=step) for step in (2, 3))]
    found = compare_runs(seen((1,), (5, 6, 7, 8), ours), seen((1,), (5, 0, 7, 8), theirs), "d")
    assert (found.tokens_part_at, found.compared, found.departure) == (1, 2, None)
    assert found.departs


def test_a_run_of_fewer_steps_or_sites_is_compared_as_far_as_it_goes():
    sites = [summed(values(step).float(), step=step) for step in range(3)]
    found = compare_runs(seen((1,), (5, 6, 7), sites), seen((1,), (5,), sites[:1]), "d")
    assert (found.compared, found.missing, found.departs) == (1, 2, False)


def test_settings_that_differ_are_stated_and_the_coarser_dtype_gives_the_tolerance():
    other = seen((1,), (), [], dtype="bfloat16", versions={"torch": "3"})
    found = compare_runs(seen((1,), (), []), other, "d")
    assert [(each.name, each.here, each.there) for each in found.differences] == [
        ("dtype", "float32", "bfloat16"),
        ("torch", "2", "3"),
    ]
    assert found.tolerance == 5e-2 and not found.departs
    assert compare_runs(seen((1,), (), []), seen((1,), (), []), "d").tolerance == 1e-4
    assert compare_runs(seen((1,), (), []), other, "d", tolerance=0.5).tolerance == 0.5
