"""Attention of a decode step over the KV cache, per format and context, against a plain read of the same bytes.

Every figure is timed in turn with a read of the caches by the same threads, so that a drifting machine moves both;
medians of pairs. Each shape and context takes as many layers as fill `--megabytes`, so that no layer is still in
the processor's caches when its turn comes again. torch's kernel (`--against-torch`) gets what it can read: the
same numbers as they are, or unpacked to float32.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from products import paired
from torch import Tensor

from decodescope.model.cache_formats import FORMATS, Held
from decodescope.model.kernels import available, cached_attention, read_all
from decodescope.model.kv_cache import KVCache

SHAPES = {"starter": (14, 2, 64), "7b": (28, 4, 128)}  # query heads, key/value heads, head size
Layer = tuple[Held, Held]


def filled(kv_heads: int, size: int, context: int, held: torch.dtype, size_bytes: int) -> list[Layer]:
    """The random caches of so many layers that they have about that many bytes."""
    layers: list[Layer] = []
    while sum(stored.nbytes for layer in layers for each in layer for stored in each.stretches) < size_bytes:
        cache = KVCache(1, held)
        cache.append(0, *torch.randn(2, 1, kv_heads, context, size))
        cache.advance(context)
        layers.append(cache.held(0))
    return layers


def tensors(layers: Sequence[Layer]) -> list[Tensor]:
    """Everything that is held."""
    return [tensor for layer in layers for each in layer for stored in each.stretches for tensor in stored.tensors]


def ours(q: Tensor, layers: Sequence[Layer]) -> None:
    """One step's attention."""
    for keys, values in layers:
        cached_attention(q, keys, values)


def torchs(q: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The same by torch's kernel."""
    for keys, values in layers:
        F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def read(memory: Sequence[Tensor]) -> None:
    """What is held, once."""
    for tensor in memory:
        read_all(tensor)


def measure(shape: str, context: int, name: str, given: argparse.Namespace) -> None:
    """A line for each kernel."""
    heads, kv_heads, size = SHAPES[shape]
    layers = filled(kv_heads, size, context, FORMATS[name], given.megabytes << 20)
    memory, q = tensors(layers), torch.randn(1, heads, given.rows, size)
    total = sum(tensor.nbytes for tensor in memory)
    runs = {"ours": partial(ours, q, layers)}
    if given.against_torch:
        plain = [(keys.plain(), values.plain()) for keys, values in layers]
        runs["torch"] = partial(torchs, q.to(plain[0][0].dtype), plain)
    for kernel, run in runs.items():
        seconds, read_seconds, share = paired(run, partial(read, memory), given.pairs)
        rates = f"{total / seconds / 1e9:6.1f} GB/s   read {total / read_seconds / 1e9:6.1f} GB/s"
        times = f"{seconds / len(layers) * 1e6:9.0f} us/layer   {1 / share:5.2f} x the read"
        print(f"{shape:8} {context:6} {name:9} {kernel:6} {times}   {rates}", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", nargs="*", type=int, default=[1024, 8192, 32768], help="multiples of 256")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", type=int, default=1, help="new positions")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against-torch", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{available()}, {given.threads} threads")
    with torch.inference_mode():
        for shape in given.shapes:
            for context in given.contexts:
                for name in given.formats:
                    measure(shape, context, name, given)


if __name__ == "__main__":
    main()
