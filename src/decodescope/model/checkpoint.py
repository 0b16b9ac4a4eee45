"""From weights on disk to a model that runs, every tensor accounted for."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from decodescope.errors import InputError, ResourceError
from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.memory import is_out_of_memory
from decodescope.model.weights import Weights, open_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DERIVED = re.compile(r".*rotary_emb\.inv_freq$")  # tables that old checkpoints carry along
_FINITE_CHUNK = 1 << 18  # values
_MOST_READERS = 4  # each has temporaries of its own
_NAMED = 4  # how many tensors a fault lists by name

Progress = Callable[[int, int], None]


def load_model(
    path: Path, dtype: str | None = None, device: str = "cpu", progress: Progress | None = None
) -> tuple[CausalLM, Weights]:
    """Load the model at `path` (folder or GGUF file), dense, as `dtype` (None: as stored).

    `progress` is told (bytes loaded, bytes in all). Peak memory is the weights and the packed bytes of
    the few tensors being read. Raises
    InputError for missing, unexpected or misshapen tensors (named) and for NaN or infinite weights.
    """
    weights = open_weights(path)
    account_for(weights)
    target, place = torch_dtype(dtype) if dtype else weights.stored_dtype, torch_device(device)
    with torch.device("meta"):
        model = CausalLM(weights.config)
    model.rope_frequencies = model.rope_frequencies.to(place)
    try:
        _fill(model, weights, target, place, progress)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ResourceError("memory.loading", path=path) from None
        raise
    return model.eval(), weights


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`. Raises InputError for one that is not offered."""
    if name not in DTYPES:
        raise InputError("dtype.unknown", name=name, known=", ".join(DTYPES))
    return DTYPES[name]


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
    model: CausalLM, weights: Weights, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> None:
    total = sum(math.prod(shape) for _, shape in weights.config.tensor_shapes()) * dtype.itemsize
    done = 0
    for name, tensor in _read_all(weights, dtype):
        _assign(model, name, tensor.to(device))
        done += tensor.numel() * dtype.itemsize
        if progress:
            progress(done, total)
    if weights.config.tie_word_embeddings:
        _tie(model, weights, dtype)


def _read_all(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in order, some being read ahead side by side, each by a thread of its own.

    Parallel regions inside the many small operations of unpacking would wait for the scheduler as soon as
    another process is busy; whole tensors side by side do not. What is being read at once never exceeds twice
    the largest tensor.
    """
    threads = torch.get_num_threads()
    readers = min(threads, _MOST_READERS)
    shapes = list(weights.config.tensor_shapes())
    room = 2 * max(math.prod(shape) for _, shape in shapes)
    pending: deque[tuple[str, int, Future[Tensor]]] = deque()
    try:
        with ThreadPoolExecutor(readers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for name, shape in shapes:
                while len(pending) > readers or (pending and sum(p[1] for p in pending) + math.prod(shape) > room):
                    yield _next(pending)
                pending.append((name, math.prod(shape), pool.submit(_read_finite, weights, name, dtype)))
            while pending:
                yield _next(pending)
    finally:
        torch.set_num_threads(threads)


def _next(pending: deque[tuple[str, int, Future[Tensor]]]) -> tuple[str, Tensor]:
    name, _, future = pending.popleft()
    return name, future.result()


def _read_finite(weights: Weights, name: str, dtype: torch.dtype) -> Tensor:
    tensor = weights.read(name, dtype)
    _refuse_nonfinite(weights, name, tensor)
    return tensor


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _tie(model: CausalLM, weights: Weights, dtype: torch.dtype) -> None:
    """One matrix for both ends; a head on disk that says otherwise is a fault, not a detail."""
    embedding = model.model.embed_tokens.weight
    if "lm_head.weight" in weights.shapes and not _equal_head(embedding, weights, dtype):
        raise InputError("checkpoint.untied_head", path=weights.path)
    model.lm_head.weight = embedding


def _equal_head(embedding: Tensor, weights: Weights, dtype: torch.dtype) -> bool:
    if weights.shapes["lm_head.weight"] != tuple(embedding.shape):
        return False
    return torch.equal(weights.read("lm_head.weight", dtype).to(embedding.device), embedding)


def _refuse_nonfinite(weights: Weights, name: str, tensor: Tensor) -> None:
    # A sum is finite only if every term is; in pieces, because summing 16 bits in float32 makes a copy.
    pieces = torch.split(tensor.view(-1), _FINITE_CHUNK)
    if all(bool(torch.isfinite(piece.sum(dtype=torch.float32))) for piece in pieces):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise InputError("checkpoint.nonfinite", path=weights.path, name=name, count=bad, total=tensor.numel())
