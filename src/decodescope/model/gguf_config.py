"""ModelConfig from a GGUF header, and the names its tensors have in a checkpoint."""

import math
from typing import Any

from decodescope.errors import InputError
from decodescope.formats.gguf import GGUFHeader
from decodescope.model.config import ARCHITECTURES, LARGEST, MOST_LAYERS, ModelConfig
from decodescope.model.rope import RopeConfig

_ROOT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length", "vocab_size",
    "rope.scaling.finetuned",
}  # fmt: skip


def checkpoint_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case [part, kind] if part in _ROOT_NAMES:
            return f"{_ROOT_NAMES[part]}.{kind}"
    return gguf_name


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """The configuration in a GGUF header. Raises InputError as `parse_config` does, naming the GGUF key."""
    family = header.architecture
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError("config.architecture", name=family[:80] or "?", known=known)
    _refuse_unknown(header, family)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError("checkpoint.missing", path=header.path, names="token_embd.weight", count=1)
    hidden, heads = _integer(header, "embedding_length"), _integer(header, "attention.head_count")
    head_dim = _integer(header, "attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if _integer(header, key, head_dim) != head_dim:
            raise InputError("config.unsupported", name=f"{family}.{key}", value=header.of_architecture(key))
    layers = _integer(header, "block_count", most=MOST_LAYERS)
    window = _integer(header, "attention.sliding_window", 0)
    return ModelConfig(
        architecture=ARCHITECTURES[family],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=_integer(header, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_integer(header, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_integer(header, "context_length"),
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in header.tensors,
        rope=_rope(header),
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm=family == "qwen3",
        windows=(window,) * layers if window else (),
    )


def _refuse_unknown(header: GGUFHeader, family: str) -> None:
    for key, value in header.metadata.items():
        prefix, _, name = key.partition(".")
        if prefix == family and name not in _READ and value not in (0, False, None, ""):
            raise InputError("config.unsupported", name=key[:80], value=str(value)[:80])


def _rope(header: GGUFHeader) -> RopeConfig:
    """GGUF's names for the rotary settings, put into config.json's.

    `attn_factor` multiplies what YaRN computes there and replaces it here: only 1 means the same.
    """
    attention_factor = header.of_architecture("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1:
        name = f"{header.architecture}.rope.scaling.attn_factor"
        raise InputError("config.unsupported", name=name, value=str(attention_factor)[:80])
    kind = header.of_architecture("rope.scaling.type", "none")
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if kind in ("linear", "yarn"):
        scaling["factor"] = header.of_architecture("rope.scaling.factor")
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.of_architecture(
            "rope.scaling.original_context_length"
        )
    theta = header.of_architecture("rope.freq_base", 10000.0)
    context = header.of_architecture("context_length")
    return RopeConfig.parse({"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": context})


def _integer(header: GGUFHeader, key: str, default: int | None = None, most: int = LARGEST) -> int:
    value = header.of_architecture(key, default)
    if type(value) is not int or not 0 <= value <= most or (value == 0 and default is None):
        raise InputError("config.size", name=f"{header.architecture}.{key}", value=str(value)[:80])
    return value


def _number(header: GGUFHeader, key: str) -> float:
    value = header.of_architecture(key)
    if type(value) is not float or not math.isfinite(value):
        raise InputError("config.size", name=f"{header.architecture}.{key}", value=str(value)[:80])
    return value
