"""Models whose layers lie on several devices: the numbers of one device, to the bit, and nothing moved needlessly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.model.placement import devices_of
from decodescope.probe import Attended
from families import VOCABULARY
from pretend_devices import Move, pretend_devices

# Whatever goes into a block differently: windows, head norms, scaled rotary tables, tied ends.
EVERY = pytest.mark.parametrize("name", ["qwen2-window", "qwen3-tied-bias", "llama-llama3", "mistral-window"])
LENGTH = 24  # beyond every window of the tiny families
LAYERS = 3


@pytest.fixture(scope="module")
def models(tiny_folders: dict[str, Path]) -> dict[str, CausalLM]:
    return {name: load_model(folder)[0] for name, folder in tiny_folders.items()}


@pytest.fixture
def moves(monkeypatch) -> Iterator[list[Move]]:
    with pretend_devices(LAYERS, monkeypatch) as found:
        yield found


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def test_the_pretended_devices_do_not_mix(moves):
    here, there = torch.ones(2, device="pretend:0"), torch.ones(2, device="pretend:1")
    for other in (there, torch.ones(2)):
        with pytest.raises(RuntimeError, match="on tensors of"):
            here + other
    assert (here + there.to("pretend:0")).tolist() == [2, 2]
    assert moves == [("pretend:1", "pretend:0", (2,))]


@EVERY
def test_layers_on_several_devices_give_the_same_bits(models, moves, tiny_folders, name):
    spread, _ = load_model(tiny_folders[name], device="auto")
    assert [block.input_layernorm.weight.device.index for block in spread.model.layers] == list(range(LAYERS))
    assert len(devices_of(spread)) == LAYERS and spread.device == torch.device("pretend", LAYERS - 1)
    for padding in (None, torch.tensor([0, 5])):
        ids, caches = random_ids(2, LENGTH), (KVCache(LAYERS), KVCache(LAYERS))
        for part in torch.split(ids, [12, 10, 1, 1], dim=1):
            expected = models[name](part, caches[0], padding, every_logit=True)
            there = None if padding is None else padding.to(spread.device)
            found = spread(part.to(spread.device), caches[1], there, every_logit=True)
            assert found.device == spread.device
            assert torch.equal(found.cpu(), expected)


def test_a_pass_moves_the_stream_once_a_device_and_what_layers_share_once_each(moves, tiny_folders):
    spread, _ = load_model(tiny_folders["qwen2-gqa"], device="auto")
    ids = random_ids(1, 5).to(spread.device)
    cache = KVCache(LAYERS)
    spread(ids, cache)
    for step in (ids, ids[:, :1], ids):  # the last behind a cache: with a mask
        moves.clear()
        spread(step, cache)
        T, masked = step.shape[1], [(1, 1, step.shape[1], cache.length)] * (step.shape[1] > 1)
        shared = [(1, 1, T, 8), (1, 1, T, 8), *masked]
        once = [("pretend:2", to, shape) for to in ("pretend:0", "pretend:1") for shape in shared]
        stream = [(f"pretend:{layer}", f"pretend:{layer + 1}", (1, T, 32)) for layer in (0, 1)]
        assert sorted(moves) == sorted([("pretend:2", "pretend:0", (1, T)), *once, *stream])


def test_a_tied_embedding_lies_with_the_head_in_one_memory(moves, tiny_folders):
    spread, _ = load_model(tiny_folders["llama-mqa-tied"], device="auto")
    assert spread.model.embed_tokens.weight is spread.lm_head.weight
    assert spread.lm_head.device == spread.device
    moves.clear()
    spread(random_ids(1, 5).to(spread.device))
    assert ("pretend:2", "pretend:0", (1, 5, 32)) in moves  # its rows travel, not the matrix
    assert max(torch.Size(shape).numel() for _, _, shape in moves) < VOCABULARY * 32


def test_cache_and_inner_values_lie_with_their_layer(moves, tiny_folders):
    spread, _ = load_model(tiny_folders["qwen3-gqa"], device="auto")

    class Places:
        def __init__(self) -> None:
            self.found: dict[tuple[str, int | None], torch.device] = {}

        def wants(self, site, layer):
            return True

        def receive(self, site, layer, value):
            self.found[site, layer] = value.keys.device if isinstance(value, Attended) else value.device

    tap, cache = Places(), KVCache(LAYERS)
    spread(random_ids(1, 6).to(spread.device), cache, tap=tap)
    assert {layer: device.index for (_, layer), device in tap.found.items()} == {0: 0, 1: 1, 2: 2, None: 2}
    for layer in range(LAYERS):
        assert {each.device.index for each in cache.fork().layer(layer)} == {layer}


def test_a_pass_that_breaks_off_leaves_nothing_behind(models, moves, tiny_folders, monkeypatch):
    spread, _ = load_model(tiny_folders["qwen2-gqa"], device="auto")
    ids = random_ids(1, 8)

    def breaks(*_: object) -> None:
        raise KeyboardInterrupt

    handle = spread.model.layers[1].mlp.register_forward_pre_hook(breaks)
    with pytest.raises(KeyboardInterrupt):
        spread(ids.to(spread.device))
    handle.remove()
    other = ids.flip(1)
    assert torch.equal(spread(other.to(spread.device)).cpu(), models["qwen2-gqa"](other))
