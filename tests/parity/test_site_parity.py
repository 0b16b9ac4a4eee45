"""Every inner value against transformers and against equations by hand: each position, norm-wise, within 1e-5."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decodescope.model import decoder
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.observe.selection import Place, places
from decodescope.probe import SITES, Attended
from families import BY_NAME
from site_references import (
    BOUND,
    DERIVED,
    ENDS,
    HOOKS,
    LENGTH,
    PADDING,
    RECONSTRUCTION,
    Errors,
    Everything,
    compare,
    error,
    random_ids,
    real_ids,
    reconstruction,
    with_weights_of,
)


def assert_within(errors: Errors, model: CausalLM, by_hand: Sequence[int] | None = None) -> None:
    """Every value that the model has was compared (by hand in these layers), and none is off."""
    there = set(places(model.config))
    assert set(errors.by_hand) == {at for at in there if by_hand is None or at[1] is None or at[1] in by_hand}
    assert set(errors.transformers) == {at for at in there if at[0] in HOOKS.keys() | DERIVED.keys()}
    assert not off(errors.transformers) and not off(errors.by_hand)
    assert errors.reconstruction < RECONSTRUCTION["float32"]


def off(errors: Mapping[Place, float]) -> dict[Place, float]:
    return {place: each for place, each in errors.items() if not each < BOUND}


def test_every_value_of_prompt_chunk_and_tokens_is_the_references(pair):
    assert_within(compare(*pair, random_ids()), pair[0])


def test_every_value_of_a_left_padded_batch_is_the_references(pair):
    assert_within(compare(*pair, random_ids(len(PADDING)), padding=PADDING), pair[0])


def test_only_scores_lack_a_value_of_transformers():
    assert {site.name for site in SITES} - HOOKS.keys() - DERIVED.keys() == {"scores"}


# --- the comparison itself


def wrong_epsilon(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    for block in model.model.layers:
        block.post_attention_layernorm.eps = 1e-4


def another_activation(_: CausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "F", SimpleNamespace(**{**vars(decoder.F), "silu": decoder.F.gelu}))  # ours alone


def shifted_rotation(_: CausalLM, patch: pytest.MonkeyPatch) -> None:
    right = decoder.rotary_table
    patch.setattr(decoder, "rotary_table", lambda rates, positions, *rest: right(rates, positions + 1, *rest))


def no_window(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    model.config = replace(model.config, windows=())


def swapped_values(model: CausalLM, _: pytest.MonkeyPatch) -> None:
    """The two key/value heads of layer 1 change places, in what is read of the values alone."""
    v_proj = model.model.layers[1].self_attn.v_proj
    v_proj.weight = torch.nn.Parameter(v_proj.weight.roll(model.config.head_dim, 0), requires_grad=False)


PLANTED = [
    (wrong_epsilon, ("mlp_norm", 0)), (another_activation, ("act", 0)), (shifted_rotation, ("q_rot", 0)),
    (no_window, ("pattern", 0)), (swapped_values, ("v", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "place"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_shows_first_where_it_is(tiny_folders, monkeypatch, plant, place):
    model, _ = load_model(tiny_folders["mistral-window"])
    plant(model, monkeypatch)
    errors = compare(model, BY_NAME["mistral-window"].reference(), random_ids(), (LENGTH,)).transformers
    assert min(off(errors), key=places(model.config).index) == place


def test_a_wrong_equation_shows_at_its_own_site_alone(tiny_folders, monkeypatch):
    """By hand each value is made from ours before it."""
    model, _ = load_model(tiny_folders["mistral-window"])
    another_activation(model, monkeypatch)
    errors = compare(model, BY_NAME["mistral-window"].reference(), random_ids(), (LENGTH,))
    assert set(off(errors.by_hand)) == {("act", layer) for layer in range(3)}


def test_an_error_counts_position_by_position_and_a_mask_out_of_place_is_infinite():
    expected = torch.tensor([[[[1e6, 0.0], [1.0, -torch.inf]]]])
    found = expected + torch.tensor([0.0, 1e-3])
    assert error(found, expected) == pytest.approx(1e-9, rel=1e-2)
    found = expected + torch.tensor([1e-3, 0.0])
    assert error(found, expected) == pytest.approx(1e-3, rel=1e-2)  # a large row hides no small one
    assert error(expected.nan_to_num(neginf=0.0), expected) == torch.inf
    assert error(expected[..., :1], expected) == torch.inf


# --- attention, recomputed


@pytest.mark.parametrize("dtype", RECONSTRUCTION)
def test_recomputed_attention_gives_what_the_kernel_gave(tiny_folders, family, dtype):
    """Prompt, a chunk and tokens behind it, with windows, and in a padded batch."""
    model, _ = load_model(tiny_folders[family.name], dtype)
    for padding in (None, torch.tensor(PADDING)):
        errors = reconstruction(model, random_ids(len(PADDING)), ENDS, padding)
        assert all(0 < each < RECONSTRUCTION[dtype] for each in errors)


@pytest.mark.parametrize("name", ["qwen2-gqa", "mistral-window"])
def test_a_pattern_without_the_right_mask_does_not_reconstruct(tiny_folders, monkeypatch, name):
    model, _ = load_model(tiny_folders[name])
    monkeypatch.setattr(Attended, "seen", lambda self, rows: None)
    ours = Everything(model.config)
    model(random_ids(), tap=ours)
    assert ours.reconstruction_error > 0.01


# --- the real models


@lru_cache(maxsize=1)
def real_model(path: Path, dtype: str) -> CausalLM:
    return load_model(path, dtype)[0]


@pytest.fixture
def real(request: pytest.FixtureRequest, all_threads: None, name: str) -> Callable[[str], CausalLM]:
    path = request.getfixturevalue("starter_path" if name == "starter" else "small_path")
    return lambda dtype: real_model(path, dtype)


@pytest.mark.parametrize("name", ["starter", "starter-small"])
def test_every_value_of_a_real_models_prompt_and_token_is_the_references(real, name):
    model, ids = real("float32"), real_ids(name, 13)
    last = model.config.num_hidden_layers - 1
    by_hand = (0, last // 2, last)
    assert_within(compare(model, with_weights_of(model), ids, (12, 13), layers=by_hand), model, by_hand)


@pytest.mark.full
@pytest.mark.parametrize("name", ["starter", "starter-small"])
def test_every_value_of_a_real_models_long_prompt_chunk_and_tokens_is_the_references(real, name):
    model, ids = real("float32"), real_ids(name, 80)
    assert_within(compare(model, with_weights_of(model), ids, (60, 78, 79, 80)), model)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["starter", "starter-small"])
def test_recomputed_attention_of_a_real_model_gives_what_the_kernel_gave_in_16_bits(real, name, dtype):
    errors = reconstruction(real(dtype), real_ids(name, 80), (60, 78, 79, 80))
    assert all(0 < each < RECONSTRUCTION[dtype] for each in errors)
