"""What a model costs by formula, where `bench` needs it."""

import math

from decodescope.experiments.bench.messages import STORED, TRANSFORMERS, Contender
from decodescope.model.config import ModelConfig
from decodescope.model.cost import count_parameters

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8.5, "int4": 5, "nf4": 4.5}  # int4: head in 8 bits


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of reading a prompt to the logits behind its last position.

    Two for every weight and token (https://arxiv.org/abs/2001.08361, section 2.1), the head's but once; and four
    for every query head, component and pair of positions that see each other, for scores and weighted values.
    """
    shapes = dict(config.tensor_shapes())
    head = math.prod(shapes.pop("model.embed_tokens.weight"))
    shapes.pop("lm_head.weight", None)
    linears = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    pairs = sum(_pairs(tokens, config.window(layer)) for layer in range(config.num_hidden_layers))
    return 2 * linears * tokens + 2 * head + 4 * config.num_attention_heads * config.head_dim * pairs


def _pairs(tokens: int, window: int | None) -> int:
    """How many pairs of a position and one it sees there are, itself among these."""
    seen = min(tokens, window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def expected_bytes(contender: Contender, config: ModelConfig, stored_bytes: int) -> int:
    """About what a contender's weights take in memory: tells whether two fit beside each other, no more."""
    weights = count_parameters(config).total
    if contender.format != STORED:
        return int(weights * _BITS.get(contender.format, 16) / 8)
    return weights * 4 if contender.portable or contender.engine == TRANSFORMERS else stored_bytes
