"""Which device the parts of a model lie on: one for all of it, or its layers spread over several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodescope.errors import InputError
from decodescope.model.config import ModelConfig
from decodescope.model.precision import Precision

AUTO = "auto"  # the processor, the one accelerator, or layers over all accelerators
_FOR_WEIGHTS = 0.9  # of the memory that is free; the rest is for cache and activations
_BITS = {"int8": 8.0, "nf4": 4.5}  # of bitsandbytes' forms
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each layer lies, where the embedding, and where the end (last norm and head)."""

    layers: tuple[torch.device, ...]
    embedding: torch.device
    end: torch.device

    @classmethod
    def all_on(cls, device: torch.device, config: ModelConfig) -> "Placement":
        """Everything on one device."""
        return cls((device,) * config.num_hidden_layers, device, device)

    def of(self, name: str) -> torch.device:
        """Where the tensor of this name in a checkpoint lies."""
        match name.split("."):
            case ["model", "layers", layer, *_]:
                return self.layers[int(layer)]
            case ["model", "embed_tokens", _]:
                return self.embedding
        return self.end

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, in the order a token travels."""
        return tuple(dict.fromkeys((self.embedding, *self.layers, self.end)))


def torch_device(name: str) -> torch.device:
    """The device called `name`. Raises InputError where torch has no such device on this machine."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise InputError("device.unknown", name=name, reason=str(error).split("\n")[0][:120]) from None
    if device.type == "meta":
        raise InputError("device.unknown", name=name, reason="meta")
    return device


def devices_called(name: str) -> tuple[torch.device, ...]:
    """The devices that `--device` means, at least one. Raises InputError as `torch_device` does."""
    if name != AUTO:
        return (torch_device(name),)
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return (torch.device("cpu"),)
    return tuple(torch.device(kind.type, index) for index in range(torch.accelerator.device_count()))


def place(config: ModelConfig, precision: Precision, devices: Sequence[torch.device]) -> Placement:
    """Where the parts of a model are to lie. Raises InputError where they do not fit on several devices."""
    if len(devices) == 1:
        return Placement.all_on(devices[0], config)
    free = [torch.get_device_module(device).mem_get_info(device)[0] for device in devices]
    return spread(config, precision, devices, [int(each * _FOR_WEIGHTS) for each in free])


def spread(
    config: ModelConfig, precision: Precision, devices: Sequence[torch.device], room: Sequence[int]
) -> Placement:
    """Layers in their order over devices with `room` bytes for weights each, so that the fullest is least full.

    A tied head is the embedding, and both lie at the end. Raises InputError where the weights do not fit.
    """
    sizes = part_bytes(config, precision)
    if _filled(sizes, room) is None:
        raise InputError("device.too_small", count=len(devices), needed=sum(sizes), room=sum(room))
    too_little, share = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (too_little + share) / 2
        if _filled(sizes, [each * middle for each in room]) is None:
            too_little = middle
        else:
            share = middle
    first, *layers, end = (devices[index] for index in _filled(sizes, [each * share for each in room]) or ())
    return Placement(tuple(layers), end if config.tie_word_embeddings else first, end)


def part_bytes(config: ModelConfig, precision: Precision) -> list[int]:
    """Bytes of the embedding (0 where it is the head), of each layer, of the end."""
    sizes = [0] * (config.num_hidden_layers + 2)
    for name, shape in config.tensor_shapes():
        match name.split("."):
            case ["model", "layers", layer, *_]:
                part = int(layer) + 1
            case ["model", "embed_tokens", _]:
                part = -1 if config.tie_word_embeddings else 0
            case _:
                part = -1
        sizes[part] += int(math.prod(shape) * _bits(precision, name, shape) / 8)
    return sizes


def _bits(precision: Precision, name: str, shape: tuple[int, ...]) -> float:
    if precision.by_bitsandbytes and name.startswith("model.layers.") and len(shape) == 2:
        return _BITS[precision.quantize]
    return 8 * (precision.of(shape) or precision.activations).itemsize


def _filled(sizes: Sequence[int], room: Sequence[float]) -> list[int] | None:
    """The device of each part, filling one after the other; None where not all fit."""
    places, device, used = [], 0, 0
    for size in sizes:
        while device < len(room) and used + size > room[device]:
            device, used = device + 1, 0
        if device == len(room):
            return None
        used += size
        places.append(device)
    return places
