"""What a model costs, from its configuration alone: parameters, weight bytes, cache bytes, what fits."""

import math
from dataclasses import dataclass
from typing import Any

from decodescope.model.config import ModelConfig

# Bits per weight of dense formats and of ggml's block formats (block bytes * 8 / values in a block).
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "Q8_0": 8.5, "Q6_K": 6.5625, "Q4_K": 4.5}
CACHE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a value in a KV cache, and of the scale that one head's values share at a position.
CACHE_FORMATS = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "float8": (1, 4), "int8": (1, 4)}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of weights by part; `head` is 0 where it is tied to the embedding."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    @property
    def non_embedding(self) -> int:
        """Without embedding and output head, as the model cards count."""
        return self.attention + self.mlp + self.norms


def count_parameters(config: ModelConfig) -> Parameters:
    """Count every weight by part."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, shape in config.tensor_shapes():
        counts[_part(name)] += math.prod(shape)
    return Parameters(**counts)


def _part(name: str) -> str:
    if "norm" in name:
        return "norms"
    if "self_attn" in name:
        return "attention"
    if "mlp" in name:
        return "mlp"
    return "head" if name.startswith("lm_head") else "embedding"


def weight_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of all weights in each dense dtype, and with every matrix in each block format.

    Block formats keep vectors (norms, biases) in float32, as GGUF files do; a real file mixes formats.
    """
    total = count_parameters(config).total
    vectors = sum(math.prod(shape) for _, shape in config.tensor_shapes() if len(shape) == 1)
    sizes: dict[str, int] = {}
    for name, bits in BITS.items():
        dense = "float" in name
        sizes[name] = int(total * bits // 8 if dense else (total - vectors) * bits // 8 + vectors * 4)
    return sizes


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int, scale_bytes: int = 0) -> int:
    """2 (K and V) * layers * key/value heads * (head size * bytes of one value + bytes of a head's scale)."""
    of_a_head = config.head_dim * dtype_bytes + scale_bytes
    return 2 * config.num_hidden_layers * config.num_key_value_heads * of_a_head


def fit(config: ModelConfig, total_bytes: int, available_bytes: int) -> dict[str, Any]:
    """Whether the weights of each dense dtype fit into memory, and how many tokens of cache fit beside them.

    `estimated`: for a process that runs already, activations are not in it. `footprint.what_fits` tells all.
    """
    dtypes = {}
    for name, size in CACHE_DTYPES.items():
        left = available_bytes - weight_bytes(config)[name]
        tokens = min(max(left, 0) // kv_bytes_per_token(config, size), config.max_position_embeddings)
        dtypes[name] = {"weights_fit": left >= 0, "tokens_left": tokens}
    return {
        "memory_total_bytes": total_bytes,
        "memory_available_bytes": available_bytes,
        "kind": "estimated",
        "dtypes": dtypes,
    }
