"""Plans over several devices: every layer has a place, in order, within the room, as evenly as can be."""

from itertools import pairwise

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.errors import InputError
from decodescope.model.config import ModelConfig, read_config
from decodescope.model.decoder import CausalLM
from decodescope.model.devices import Placement, devices_called, part_bytes, place, spread, torch_device
from decodescope.model.precision import Precision
from pretend_devices import pretend_devices
from repository import ROOT

SIXTEEN = Precision(torch.bfloat16, torch.bfloat16)
NAMES = ("qwen2.5-0.5b-instruct", "qwen2.5-7b-instruct")  # tied and not
CONFIGS = {name: read_config(ROOT / "tests/data/configs" / f"{name}.config.json") for name in NAMES}
GIB = 1 << 30
EACH = pytest.mark.parametrize("name", NAMES)


def devices(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def loads(placement: Placement, config: ModelConfig, precision: Precision) -> dict[torch.device, int]:
    """Bytes on each device."""
    embedding, *layers, end = part_bytes(config, precision)
    found = dict.fromkeys((placement.embedding, *placement.layers, placement.end), 0)
    for device, size in zip(
        (placement.embedding, *placement.layers, placement.end), (embedding, *layers, end), strict=True
    ):
        found[device] += size
    return found


@EACH
def test_the_parts_are_the_whole(name):
    config = CONFIGS[name]
    sizes = part_bytes(config, SIXTEEN)
    with torch.device("meta"):
        model = CausalLM(config)
    whole = sum(2 * parameter.numel() for parameter in model.parameters())
    assert sum(sizes) == whole - config.tie_word_embeddings * 2 * model.lm_head.weight.numel()
    assert len(set(sizes[1:-1])) == 1 and len(sizes) == config.num_hidden_layers + 2
    four_bits = part_bytes(config, Precision(torch.float32, torch.bfloat16, "nf4", by_bitsandbytes=True))
    assert four_bits[1] == pytest.approx(sizes[1] * 4.5 / 16, rel=1e-2)
    assert four_bits[-1] == pytest.approx(sizes[-1], rel=1e-4)  # the head stays dense


@settings(max_examples=60, derandomize=True, deadline=None)
@given(name=st.sampled_from(NAMES), room=st.lists(st.integers(1 << 28, 40 * GIB), min_size=2, max_size=5))
def test_a_plan_is_in_order_and_within_the_room_or_refused(name, room):
    config, them = CONFIGS[name], devices(len(room))
    try:
        placement = spread(config, SIXTEEN, them, room)
    except InputError as fault:
        biggest = max(part_bytes(config, SIXTEEN))  # what can be left empty at the end of each device
        assert fault.key == "device.too_small"
        assert sum(max(each - biggest, 0) for each in room) < sum(part_bytes(config, SIXTEEN))
        return
    order = [them.index(device) for device in (*placement.layers, placement.end)]
    assert all(one <= two for one, two in pairwise(order))
    assert placement.embedding == (placement.end if config.tie_word_embeddings else placement.devices[0])
    assert all(size <= room[them.index(device)] for device, size in loads(placement, config, SIXTEEN).items())


@EACH
@pytest.mark.parametrize("room", [(24, 24), (16, 24), (12, 12, 12), (10, 6, 10)])
def test_the_fullest_device_is_no_fuller_than_in_accelerates_balanced_plan(name, room):
    """accelerate keeps room on the first device for a layer to be brought in, and may leave it empty."""
    config, memory = CONFIGS[name], [each * GIB for each in room]
    placement = spread(config, SIXTEEN, devices(len(room)), memory)
    ours = [size / memory[device.index] for device, size in loads(placement, config, SIXTEEN).items()]
    assert max(ours) <= accelerates_fullest(config, memory)
    assert len(placement.devices) == len(room)


def accelerates_fullest(config: ModelConfig, memory: list[int]) -> float:
    with torch.device("meta"):
        model = CausalLM(config)
    if config.tie_word_embeddings:
        model.model.embed_tokens = torch.nn.Identity()
    model.to(torch.bfloat16)
    limits = get_balanced_memory(model, dict(enumerate(memory)), ["Block"])
    found = infer_auto_device_map(model, limits, ["Block"], clean_result=False)
    used = [0] * len(memory)
    for name, parameter in model.named_parameters():
        (at,) = [device for part, device in found.items() if name.startswith(f"{part}.")]
        used[at] += 2 * parameter.numel()
    return max(size / limit for size, limit in zip(used, memory, strict=True))


def test_what_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=r"15,231,233,024 bytes.* 2 devices with 8,589,934,592 bytes"):
        spread(CONFIGS[NAMES[1]], SIXTEEN, devices(2), [4 * GIB, 4 * GIB])


def test_a_tensor_is_sent_where_its_part_lies():
    config = CONFIGS[NAMES[1]]
    placement = spread(config, SIXTEEN, devices(2), [20 * GIB, 20 * GIB])
    first, last = devices(2)
    assert placement.of("model.embed_tokens.weight") == placement.of("model.layers.0.mlp.up_proj.weight") == first
    assert placement.of("model.layers.27.self_attn.k_proj.bias") == placement.of("model.norm.weight") == last
    assert placement.of("lm_head.weight") == last


def test_auto_without_an_accelerator_is_the_processor(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert devices_called("auto") == (torch.device("cpu"),)


def test_auto_with_one_accelerator_is_that_one_whatever_its_memory(monkeypatch):
    with pretend_devices(1, monkeypatch, free_bytes=1):
        found = devices_called("auto")
        assert found == (torch.device("pretend", 0),)
        assert place(CONFIGS[NAMES[0]], SIXTEEN, found).devices == found


def test_auto_leaves_a_tenth_of_what_is_free_to_the_cache(monkeypatch):
    config = CONFIGS[NAMES[0]]
    need = sum(part_bytes(config, SIXTEEN))
    with pretend_devices(2, monkeypatch, free_bytes=int(need / 2 / 0.9)):
        with pytest.raises(InputError) as fault:
            place(config, SIXTEEN, devices_called("auto"))
        assert fault.value.values["room"] == pytest.approx(need, abs=4)
    with pretend_devices(2, monkeypatch, free_bytes=need):
        assert len(place(config, SIXTEEN, devices_called("auto")).devices) == 2


@pytest.mark.parametrize("name", ["meta", "qpu", "cuda:99", ""])
def test_a_device_that_is_none_is_refused(name):
    with pytest.raises(InputError, match="--device cpu"):
        torch_device(name)
