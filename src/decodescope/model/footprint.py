"""How much memory a model will take, before it is loaded: from its configuration and what its file holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from decodescope.model.config import ModelConfig
from decodescope.model.cost import kv_bytes_per_token, weight_bytes
from decodescope.model.kernels import row_bytes
from decodescope.model.precision import DTYPES, QUANTIZE, Precision, choose_precision
from decodescope.model.quantize import block_format
from decodescope.model.reading import in_order, readers
from decodescope.model.streaming import layer_on_disk, spread
from decodescope.model.weights import FLOATS, Weights

PROMPT_PIECE = 512  # positions of a long prompt that go through the model at once
_CACHE_BLOCK = 256  # positions that the cache grows by
# Measured in whole processes, beside what can be counted: for each id a vocabulary and then tables, what
# allocators keep, what choosing and recording a token takes, the work memory of large products.
_VOCABULARY_PER_ID = 750
_TABLES_PER_ID = 400
_STEP_BYTES = 16 << 20
_PROMPT_BYTES = 36 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a process takes at most, by what they are for; all of them estimated."""

    process_bytes: int  # interpreter, libraries, vocabulary
    weight_bytes: int  # in memory to stay; of layers on disk the room for two
    loading_bytes: int  # of tensors being converted, beside the weights, when loading takes most
    cache_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most of all times: when loading ends, or with a long prompt."""
        running = self.cache_bytes + self.activation_bytes
        return self.process_bytes + self.weight_bytes + max(self.loading_bytes, running)


def footprint(
    weights: Weights, precision: Precision, process_bytes: int, positions: int, on_disk: int = 0
) -> Footprint:
    """What a model in this precision takes with a cache of `positions`, `on_disk` of its layers left there.

    `process_bytes` is what the process takes without the model: see `process_bytes`.
    """
    config, cached = weights.config, -(-positions // _CACHE_BLOCK) * _CACHE_BLOCK
    stay, loading = _weight_bytes(weights, precision, spread(on_disk, config.num_hidden_layers))
    return Footprint(
        process_bytes=process_bytes,
        weight_bytes=stay,
        loading_bytes=loading,
        cache_bytes=cached * kv_bytes_per_token(config, precision.activations.itemsize),
        activation_bytes=_activation_bytes(config, precision.activations, min(positions, PROMPT_PIECE)),
    )


def process_bytes(resident_bytes: int, config: ModelConfig, *, vocabulary_read: bool) -> int:
    """What a process takes without weights that takes `resident_bytes` now, having imported what it needs."""
    per_id = _TABLES_PER_ID if vocabulary_read else _TABLES_PER_ID + _VOCABULARY_PER_ID
    return resident_bytes + per_id * config.vocab_size


def what_fits(weights: Weights, process_bytes: int, memory: tuple[int, int], stored: bool) -> dict[str, Any]:
    """Which precisions fit into this machine's memory (total and available bytes), and how many tokens of cache
    beside them.

    `stored`: the weights lie in a file and can be run as they are. Block formats stand for a GGUF file of this
    model in that format.
    """
    total, available = memory
    rows = {
        name: _row(weights.config, *sizes, process_bytes, available) for name, sizes in _sizes(weights, stored)
    }
    return {
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "process_bytes": process_bytes,
        "kind": "estimated",
        "dtypes": rows,
    }


def _sizes(weights: Weights, stored: bool) -> Iterator[tuple[str, tuple[int, int, torch.dtype]]]:
    """Bytes of the weights, bytes beside them while loading, and the dtype of activations, by the row's name."""
    ways: list[tuple[str, str | None, str]] = [("stored", None, "none")] * stored
    ways += [(name, name, "none") for name in DTYPES] + [(name, None, name) for name in QUANTIZE if name != "none"]
    for name, dtype, quantize in ways:
        precision = choose_precision(weights, dtype, quantize, torch.device("cpu"))
        yield name, (*_weight_bytes(weights, precision, frozenset()), precision.activations)
    for name, size in weight_bytes(weights.config).items():
        if name not in DTYPES:
            yield name, (size, 0, torch.float32)


def _row(
    config: ModelConfig, weight_bytes: int, loading: int, activations: torch.dtype, process: int, available: int
) -> dict[str, int | bool]:
    needed = process + weight_bytes + max(loading, _activation_bytes(config, activations, PROMPT_PIECE))
    left = available - needed
    tokens = max(left, 0) // kv_bytes_per_token(config, activations.itemsize)
    return {
        "weight_bytes": weight_bytes,
        "needed_bytes": needed,
        "weights_fit": left >= 0,
        "tokens_left": min(tokens, config.max_position_embeddings),
    }


def tensor_bytes(weights: Weights, name: str, precision: Precision) -> int:
    """Bytes of one tensor as it will be held."""
    shape, stored = weights.shapes[name], weights.formats[name]
    if len(shape) == 1:
        return shape[0] * precision.activations.itemsize
    rows, columns = shape
    packed = row_bytes(stored, columns)
    if precision.quantize != "none":
        wanted = block_format(precision.quantize, name, columns)
        sizes = [size for size in (packed, row_bytes(wanted, columns) if wanted else None) if size]
        return rows * (min(sizes) if sizes else 2 * columns)  # see `quantize.pack`
    if precision.matrices is None and packed:
        return rows * packed
    return rows * columns * (precision.matrices or FLOATS.get(stored, torch.float32)).itemsize


def _weight_bytes(weights: Weights, precision: Precision, on_disk: frozenset[int]) -> tuple[int, int]:
    """Bytes of the weights that stay in memory, and of all else when loading takes most."""
    stay = most = 0
    layers = dict.fromkeys(on_disk, 0)
    converted = {name: _converted_bytes(weights, name, precision) for name in weights.shapes}
    at_once = 2 * max(converted.values())
    for name, _ in in_order(weights.config):
        size = tensor_bytes(weights, name, precision)
        most = max(most, stay + size + min(readers() * converted[name], at_once))
        layer = layer_on_disk(name, on_disk)
        if layer is None:
            stay += size
        else:
            layers[layer] += size
    stay += 2 * max(layers.values(), default=0)
    return stay, max(most - stay, 0)


def _converted_bytes(weights: Weights, name: str, precision: Precision) -> int:
    """Bytes of one tensor as it is stored, which are in memory as well while it is read; blocks kept are not."""
    stored, (rows, columns) = weights.formats[name], (1, *weights.shapes[name])[-2:]
    packed = row_bytes(stored, columns)
    if packed and precision.quantize == "none" and precision.matrices is None:
        return 0
    return rows * (packed or columns * FLOATS.get(stored, torch.float32).itemsize)


def _activation_bytes(config: ModelConfig, activations: torch.dtype, positions: int) -> int:
    """Bytes of what lives at once where a layer is widest: in its MLP, four of each width a position."""
    values = 4 * positions * (config.hidden_size + config.intermediate_size)
    return values * activations.itemsize + _STEP_BYTES + _PROMPT_BYTES * (positions > 1)
