"""From weights on disk to a model that runs, every tensor accounted for."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from decodescope.errors import InputError, ResourceError
from decodescope.model.bitsandbytes import Quantized, quantized
from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.devices import Placement, devices_called, place
from decodescope.model.kernels import Arena, Packed, keep_freed_blocks
from decodescope.model.linear import Matrix
from decodescope.model.memory import is_out_of_memory
from decodescope.model.on_disk import OnDisk
from decodescope.model.placement import connect
from decodescope.model.precision import Precision, choose_precision
from decodescope.model.reading import read_all, read_one
from decodescope.model.streaming import Shelf, stream_layers
from decodescope.model.weights import Weights, open_weights

_DERIVED = re.compile(r".*rotary_emb\.inv_freq$")  # tables that old checkpoints carry along
_NAMED = 4  # how many tensors a fault lists by name

Progress = Callable[[int, int], None]


def load_model(
    path: Path,
    dtype: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    quantize: str = "none",
) -> tuple[CausalLM, Weights]:
    """Load the model at `path` (folder or GGUF file); what it is held in: see `precision.choose_precision`.

    `progress` is told (values loaded, values in all). Peak memory is the weights and the few tensors being read.
    Raises InputError for missing, unexpected or misshapen tensors (named) and for NaN or infinite weights.
    """
    weights = open_weights(path)
    precision = choose_precision(weights, dtype, quantize, devices_called(device)[-1])
    return fill(weights, precision, device, progress), weights


def fill(
    weights: Weights,
    precision: Precision,
    device: str = "cpu",
    progress: Progress | None = None,
    on_disk: frozenset[int] = frozenset(),
) -> CausalLM:
    """A model with these weights; the matrices of the layers `on_disk` stay there, see `streaming`.

    Raises InputError as `load_model` does, and ResourceError where memory or disk do not suffice.
    """
    account_for(weights)
    placement = place(weights.config, precision, devices_called(device))
    if on_disk and placement.end.type != "cpu":
        raise InputError("disk.device", device=device)
    with torch.device("meta"):
        model = CausalLM(weights.config)
    model.rope_frequencies = model.rope_frequencies.to(placement.end)
    keep_freed_blocks()
    try:
        _fill(
            model, weights, precision, placement, progress, Shelf(weights, on_disk, precision.quantize == "none")
        )
        if on_disk:
            stream_layers(model)
        if len(placement.devices) > 1:
            connect(model)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ResourceError("memory.loading", path=weights.path) from None
        raise
    model.held_as = precision.held_as
    return model.eval()


def account_for(weights: Weights) -> None:
    """Compare the tensors on disk with those the configuration asks for. Raises InputError naming them."""
    expected = _expected(weights.config, len(weights.shapes))
    found = {name: shape for name, shape in weights.shapes.items() if not _DERIVED.match(name)}
    if weights.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # checked against the embedding while loading
    for key, names in (
        ("missing", expected.keys() - found.keys()),
        ("unexpected", found.keys() - expected.keys()),
    ):
        if names:
            raise InputError(f"checkpoint.{key}", path=weights.path, count=len(names), names=_listed(names))
    wrong = {name for name in expected if expected[name] != found[name]}
    if wrong:
        details = "; ".join(
            f"{name} {list(found[name])}, not {list(expected[name])}" for name in sorted(wrong)[:_NAMED]
        )
        raise InputError("checkpoint.shapes", path=weights.path, details=details)


def _expected(config: ModelConfig, on_disk: int) -> dict[str, tuple[int, ...]]:
    """The tensors asked for; a config with absurdly many layers stops at what the file could hold."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in config.tensor_shapes():
        expected[name] = shape
        if len(expected) > on_disk + 1000:
            break
    return expected


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown}, ..."


def _fill(
    model: CausalLM,
    weights: Weights,
    precision: Precision,
    placement: Placement,
    progress: Progress | None,
    shelf: Shelf,
) -> None:
    total, done = sum(math.prod(shape) for _, shape in weights.config.tensor_shapes()), 0
    take = Arena().take if placement.end.type == "cpu" else _plain
    for name, found in read_all(weights, precision, lambda name: _plain if shelf.holds(name) else take):
        if shelf.holds(name):
            _assign(model, name, shelf.put(name, found))
        else:
            _assign(model, name, _settled(name, found, precision, placement.of(name)))
        done += math.prod(found.shape)
        if progress:
            progress(done, total)
    if weights.config.tie_word_embeddings:
        _tie(model, weights, precision)


def _settled(
    name: str, found: Tensor | Packed, precision: Precision, device: torch.device
) -> Tensor | Packed | Quantized:
    """A tensor where it is to lie, and held as it is to be there."""
    if isinstance(found, Packed):
        return found
    moved = found.to(device)
    by_bitsandbytes = precision.by_bitsandbytes and name.startswith("model.layers.") and moved.ndim == 2
    return quantized(moved, precision.quantize) if by_bitsandbytes else moved


def _plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _assign(model: nn.Module, name: str, found: Tensor | Packed | OnDisk | Quantized) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, Matrix) and leaf == "weight":
        owner.hold(found)
    else:
        assert isinstance(found, Tensor)  # vectors are never packed
        setattr(owner, leaf, nn.Parameter(found, requires_grad=False))


def _tie(model: CausalLM, weights: Weights, precision: Precision) -> None:
    """One matrix for both ends; a head on disk that says otherwise is a fault, not a detail."""
    embedding = model.model.embed_tokens.in_memory
    if "lm_head.weight" in weights.shapes and not _equal_head(embedding, weights, precision):
        raise InputError("checkpoint.untied_head", path=weights.path)
    model.lm_head.hold(embedding)


def _equal_head(embedding: Tensor | Packed, weights: Weights, precision: Precision) -> bool:
    if weights.shapes["lm_head.weight"] != tuple(embedding.shape):
        return False
    head = read_one(weights, "lm_head.weight", precision, _plain)
    if isinstance(embedding, Packed) or isinstance(head, Packed):
        return isinstance(head, Packed) and isinstance(embedding, Packed) and head.equals(embedding)
    return torch.equal(head.to(embedding.device), embedding)
