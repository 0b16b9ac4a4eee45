"""Weights made from a configuration alone: the same for everybody, of a size that keeps activations realistic."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from decodescope.errors import InputError
from decodescope.model.checkpoint import fill
from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.precision import choose_precision
from decodescope.model.random_weights import RandomWeights

SEVEN = Path(__file__).parents[2] / "docs" / "examples" / "qwen2.5-7b-instruct.json"
CPU = torch.device("cpu")
# 28 layers as in the 7B, narrow enough to run at once; rows that no block of values fits evenly.
DEEP = {
    "hidden_size": 256,
    "intermediate_size": 1354,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20_011,
}

DEVIATIONS = (
    ("layers.0.mlp.down_proj", 1354**-0.5),
    ("layers.9.self_attn.q_proj", 2 / 16),
    ("layers.27.self_attn.v_proj", 1 / 16),
    ("layers.27.self_attn.o_proj", 0.5 / 16),
    ("embed_tokens", 4 / 16),
)


def written(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(SEVEN.read_text()), **changes}))
    return file


def model_of(weights: RandomWeights, dtype: str = "float32") -> CausalLM:
    return fill(weights, choose_precision(weights, dtype, "none", CPU))


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> RandomWeights:
    return RandomWeights(written(tmp_path_factory.mktemp("deep"), **DEEP))


def test_a_name_decides_the_values_whatever_is_read_before_or_beside_it(deep):
    names = [name for name in deep.shapes if ".layers.1" in name]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda name: deep.read(name, torch.float32), reversed(names)))
    fresh = RandomWeights(deep.path.parent)
    assert len(names) == 11 * 12  # layers 1 and 10 to 19
    for name, tensor in zip(names, reversed(beside), strict=True):
        assert torch.equal(tensor, fresh.read(name, torch.float32)), name


def test_every_dtype_holds_the_same_numbers(deep):
    name = "model.layers.3.mlp.up_proj.weight"
    exact = deep.read(name, torch.float32)
    assert torch.equal(deep.read(name, None), exact.bfloat16())
    assert torch.equal(exact, exact.bfloat16().float())
    taken = deep.read(name, torch.float16, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    assert torch.equal(taken, exact.half())


def test_no_two_rows_and_no_two_matrices_are_alike(deep):
    embedding = deep.read("model.embed_tokens.weight", torch.float32)
    assert embedding.numel() > 4_194_301  # longer than the block of values behind it
    assert len(embedding.unique(dim=0)) == len(embedding)
    up, gate = (deep.read(f"model.layers.0.mlp.{name}_proj.weight", torch.float32) for name in ("up", "gate"))
    alike = torch.corrcoef(torch.stack((up.flatten(), gate.flatten())))[0, 1]
    assert abs(alike) < 0.01


def test_the_standard_deviations_are_those_described(deep):
    for name, unit in DEVIATIONS:
        values = deep.read(f"model.{name}.weight", torch.float32)
        assert float(values.std()) == pytest.approx(unit, rel=0.02)
        assert abs(float(values.mean())) < 0.02 * unit
    assert torch.equal(deep.read("model.norm.weight", None), torch.ones(256, dtype=torch.bfloat16))


@pytest.mark.parametrize("tied", [True, False])
def test_activations_keep_their_size_through_28_layers_and_logits_decide_something(tmp_path, tied):
    model = model_of(RandomWeights(written(tmp_path, **DEEP, tie_word_embeddings=tied)))
    sizes: list[float] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _block, _args, out: sizes.append(float(out.square().mean().sqrt())))
    ids = torch.randint(0, DEEP["vocab_size"], (1, 48), generator=torch.Generator().manual_seed(1))
    logits = model(ids, every_logit=True)[0]
    assert len(sizes) == 28
    assert sizes[0] > 0.3 and 2 < sizes[-1] < 10  # of real models: below one at first, then a few
    assert 3 < float(logits.std()) < 5
    entropy = float(torch.special.entr(logits.softmax(-1)).sum(-1).mean())
    assert 1 < entropy < 6  # nats; ln V is 9.9
    assert len(logits.argmax(-1).unique()) > 40  # of 48 positions


def test_its_shapes_and_bytes_are_those_of_the_configuration():
    weights = RandomWeights(SEVEN)
    assert isinstance(weights.config, ModelConfig)
    assert dict(weights.config.tensor_shapes()) == weights.shapes
    assert weights.stored_bytes() == {"BF16": 15_231_233_024}


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        RandomWeights(tmp_path)
