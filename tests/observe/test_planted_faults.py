"""A fault planted in a model shows in its fingerprints beside those of a good run: first where it is."""

import math
from collections.abc import Callable

import pytest
import torch
from recorded_runs import one_pass, prompt_ids

from decodescope.analysis.departure import first_departure
from decodescope.model import decoder
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.observe.recording import Watch
from decodescope.probe import BY_NAME as SITES
from decodescope.trace.site_records import SiteSummary

TOLERANCE = 1e-4
FAMILIES = ["qwen2-gqa", "qwen3-gqa", "llama-gqa", "mistral-window"]


def changed(linear: torch.nn.Linear, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    linear.weight = torch.nn.Parameter(change(linear.weight.clone()), requires_grad=False)
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(change(linear.bias[:, None].clone())[:, 0], requires_grad=False)


def nan_in_up(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    changed(model.model.layers[2].mlp.up_proj, lambda w: w.index_fill(0, torch.tensor([11]), torch.nan))


def one_head_times_10(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    """Query head 1 of layer 1."""
    d = model.config.head_dim
    scale = torch.ones(model.config.num_attention_heads * d, 1)
    scale[d : 2 * d] = 10
    changed(model.model.layers[1].self_attn.q_proj, lambda w: w * scale)


def wrong_epsilon(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    model.model.layers[1].post_attention_layernorm.eps = 1e-2


def rotation_shifted_by_one(_: CausalLM, patch: pytest.MonkeyPatch) -> None:
    right = decoder.rotary_table
    patch.setattr(decoder, "rotary_table", lambda rates, positions, *rest: right(rates, positions + 1, *rest))


def keys_shifted_by_one(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    """Only the keys of layer 1: the queries stay in place."""
    right = decoder.rotate
    calls = iter(range(10**6))  # q and k of each layer in turn

    def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        late = next(calls) % (2 * model.config.num_hidden_layers) == 3
        return right(x.roll(1, dims=2) if late else x, rotary)

    patch.setattr(decoder, "rotate", rotate)


def swapped_key_heads(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    d = model.config.head_dim
    changed(model.model.layers[2].self_attn.k_proj, lambda w: w.roll(d, 0))


def swapped_value_heads(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    d = model.config.head_dim
    changed(model.model.layers[0].self_attn.v_proj, lambda w: w.roll(d, 0))


def one_weight_of_the_head(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight[40, 3] += 1.0
        return weight

    changed(model.lm_head, change)


PLANTED = [
    (nan_in_up, 2, "up"), (one_head_times_10, 1, "q"), (wrong_epsilon, 1, "mlp_norm"),
    (rotation_shifted_by_one, 0, "q_rot"), (keys_shifted_by_one, 1, "k_rot"), (swapped_key_heads, 2, "k"),
    (swapped_value_heads, 0, "v"), (one_weight_of_the_head, None, "logits"),
]  # fmt: skip


def summaries(model: CausalLM) -> list[SiteSummary]:
    return one_pass(model, prompt_ids(24), Watch(summarise=["*"])).summaries


@pytest.mark.parametrize(("plant", "layer", "site"), PLANTED, ids=lambda each: getattr(each, "__name__", None))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_site_that_departs_is_the_one_that_was_spoilt(
    tiny_folders, monkeypatch, name, plant, layer, site
):
    good, bad = (load_model(tiny_folders[name])[0] for _ in range(2))
    expected = summaries(good)
    plant(bad, monkeypatch)
    departure, before = first_departure(list(zip(summaries(bad), expected, strict=True)), TOLERANCE)
    assert departure is not None
    assert (departure.layer, departure.site) == (layer, site)
    assert before == 0.0  # what comes before it is the same to the last bit
    assert departure.distance > TOLERANCE and site in SITES


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exchange_of_heads_changes_the_signature_alone(tiny_folders, monkeypatch, name):
    good, bad = (load_model(tiny_folders[name])[0] for _ in range(2))
    swapped_key_heads(bad, monkeypatch)
    departure, _ = first_departure(list(zip(summaries(bad), summaries(good), strict=True)), TOLERANCE)
    assert departure is not None and departure.figure == "signature"


def test_the_distance_from_the_kernel_is_not_a_number_where_a_pattern_is_none(tiny_folders):
    model, _ = load_model(tiny_folders["qwen2-gqa"])
    changed(model.model.layers[0].mlp.up_proj, lambda weight: weight * torch.nan)
    error = one_pass(model, prompt_ids(24), Watch(summarise=["pattern"])).reconstruction_error
    assert error is not None and math.isnan(error)
