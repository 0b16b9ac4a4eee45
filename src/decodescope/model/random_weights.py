"""Seeded random weights for the shapes of a config.json: a model of any size without a download."""

import math
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decodescope.model.config import read_config
from decodescope.model.kernels import Packed
from decodescope.model.weights import Take

_SEED = 0
# One block of normal values serves every tensor, read round and round from a place that the tensor's name decides:
# drawing 7.6e9 values would take minutes, copying them takes seconds. A prime length, so that no two rows of a
# matrix are the same.
_BLOCK_VALUES = 4_194_301
_CHUNK_VALUES = 1 << 18  # a chunk and its temporaries stay near the processor's cache
_GAINS = {"embed_tokens": 4.0, "lm_head": 4.0, "q_proj": 2.0, "k_proj": 2.0, "o_proj": 0.5}
_BIAS_STD = 0.1


class RandomWeights:
    """A checkpoint that lies nowhere; `path` is its config.json. Equal names give equal values, in any order.

    Weights are normal. A matrix has the standard deviation 1 / sqrt(columns): from the unit activations behind a
    norm it makes unit ones, so that each layer adds about as much to the residual stream, whatever its width.
    Queries and keys have twice that (scores with a deviation of 4: heads that choose), the output of attention
    half: else the mean over the context takes over and all positions say the same. Embedding and head have four
    times that: logits with a deviation of 4, an entropy of about ln V - 8 nats for V rows. Biases: 0.1; norms: 1.
    """

    stored_dtype = torch.bfloat16  # as most checkpoints are

    def __init__(self, path: Path) -> None:
        """From a config.json, or the folder it lies in. Raises InputError as `read_config` does."""
        self.path = path / "config.json" if path.is_dir() else path
        self.config = read_config(self.path)
        self.shapes = dict(self.config.tensor_shapes())
        self.formats = dict.fromkeys(self.shapes, "BF16")

    def read(self, name: str, dtype: torch.dtype | None, take: Take | None = None) -> Tensor:
        """One tensor on the CPU, in memory from `take`: the same bfloat16 values as any `dtype`."""
        shape, dtype = self.shapes[name], dtype or self.stored_dtype
        out = take(shape, dtype) if take else torch.empty(shape, dtype=dtype)
        if "norm" in name:
            return out.fill_(1.0)
        _fill(out.view(-1), zlib.crc32(name.encode()), _std(name, shape))
        return out

    def whereabouts(self, name: str, held: Tensor | Packed) -> None:
        """They lie nowhere."""

    def stored_bytes(self) -> dict[str, int]:
        """What the weights would take on a disk."""
        return {"BF16": sum(map(math.prod, self.shapes.values())) * self.stored_dtype.itemsize}


def _fill(out: Tensor, start: int, std: float) -> None:
    """Fill a vector with the block from `start` on, going round, chunk by chunk."""
    block, done = _block(), 0
    while done < len(out):
        at = (start + done) % _BLOCK_VALUES
        count = min(_CHUNK_VALUES, _BLOCK_VALUES - at, len(out) - done)
        out[done : done + count] = block[at : at + count].mul(std).bfloat16()
        done += count


@cache
def _block() -> Tensor:
    return torch.from_numpy(np.random.default_rng(_SEED).standard_normal(_BLOCK_VALUES, dtype=np.float32))


def _std(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) == 1:
        return _BIAS_STD
    return _GAINS.get(name.split(".")[-2], 1.0) / math.sqrt(shape[1])
