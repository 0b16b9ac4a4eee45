"""Tiny models of transformers written as GGUF files, the way llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from gguf import quants

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Mistral goes by `llama` in GGUF files.
ARCHITECTURES = {"Qwen2": "qwen2", "Qwen3": "qwen3", "Llama": "llama", "Mistral": "llama"}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    owner, _, leaf = name.rpartition(".")
    if not owner.startswith("model.layers."):
        return f"{NAMES[owner]}.{leaf}"
    _, _, layer, part = owner.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{leaf}"


def pairs_side_by_side(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head reordered so that the rotary pair (i, i + d/2) stands at (2i, 2i + 1)."""
    out = np.empty_like(rows)
    for head in range(len(rows) // head_dim):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + i + head_dim // 2]
    return out


def write_metadata(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, head_dim: int) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, family: str, *, kind: str = "F32",
    extra: dict[str, np.ndarray] | None = None, drop: str = "\0", metadata: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write `model`; matrices whose rows are whole blocks as `kind`, all else as float32.

    `extra` adds tensors, `drop` leaves out those whose GGUF name contains it, `metadata` adds values.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    write_metadata(writer, config, head_dim)
    for key, value in (metadata or {}).items():
        kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(f"{ARCHITECTURES[family]}.{key}", value, kinds[type(value)])
    tensors = {gguf_name(name): (name, tensor.numpy()) for name, tensor in model.named_parameters()}
    for name, (original, values) in tensors.items():
        if drop in name:
            continue
        if ARCHITECTURES[family] == "llama" and (".q_proj." in original or ".k_proj." in original):
            values = pairs_side_by_side(values, head_dim)
        whole = (
            values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        )
        stored = gguf.GGMLQuantizationType[kind if whole else "F32"]
        writer.add_tensor(name, quants.quantize(values, stored), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
