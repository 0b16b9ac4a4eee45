"""ModelConfig: what config.json says, checked; and the shape of every tensor that follows from it.

A family differs from another only by numbers and by named parts decided here (`qkv_bias`, `qk_norm` ...).
A key that would change the maths and is not implemented is refused by name, never dropped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodescope.errors import InputError
from decodescope.model.rope import RopeConfig

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
LARGEST = 1 << 24  # no dimension of these families comes near; a hostile number stops here
MOST_LAYERS = 1 << 12

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_READ = {
    *_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "architectures", "model_type",
    "partial_rotary_factor",
}  # fmt: skip
_HARMLESS = {
    "attention_dropout", "auto_map", "bos_token_id", "chat_template", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "resid_pdrop", "return_dict", "tokenizer_class", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Field names are the keys of config.json where such a key exists."""

    architecture: str
    vocab_size: int  # rows of the embedding and width of the logits, not the tokenizer's entries
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: how many positions it looks back, None for all

    def window(self, layer: int) -> int | None:
        """How many positions `layer` sees, its own included; None means all."""
        return self.windows[layer] if self.windows else None

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight, under the checkpoint's names."""
        D, V = self.hidden_size, self.vocab_size
        yield "model.embed_tokens.weight", (V, D)
        for i in range(self.num_hidden_layers):
            for name, shape in self._layer_shapes():
                yield f"model.layers.{i}.{name}", shape
        yield "model.norm.weight", (D,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (V, D)

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        D, F, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        linears = (
            ("self_attn.q_proj", q, D, self.qkv_bias),
            ("self_attn.k_proj", kv, D, self.qkv_bias),
            ("self_attn.v_proj", kv, D, self.qkv_bias),
            ("self_attn.o_proj", D, q, self.o_bias),
            ("mlp.gate_proj", F, D, self.mlp_bias),
            ("mlp.up_proj", F, D, self.mlp_bias),
            ("mlp.down_proj", D, F, self.mlp_bias),
        )
        yield "input_layernorm.weight", (D,)
        yield "post_attention_layernorm.weight", (D,)
        for name, rows, columns, biased in linears:
            yield f"{name}.weight", (rows, columns)
            if biased:
                yield f"{name}.bias", (rows,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (d,)
            yield "self_attn.k_norm.weight", (d,)

    def __post_init__(self) -> None:
        sizes = (*_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings")
        for name in sizes:
            _check_size(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError("config.groups", heads=self.num_attention_heads, kv_heads=self.num_key_value_heads)
        if self.head_dim % 2:
            raise InputError("config.head_dim", value=self.head_dim)
        if type(self.rms_norm_eps) is not float or not 0 < self.rms_norm_eps < 1:
            raise InputError("config.size", name="rms_norm_eps", value=_short(self.rms_norm_eps))


def read_config(path: Path) -> ModelConfig:
    """Read a config.json. Raises InputError for unreadable JSON and for everything `parse_config` refuses."""
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("config.missing", path=path) from None
    except OSError as error:
        raise InputError("config.unreadable", path=path, reason=error.strerror or error) from None
    except (ValueError, RecursionError) as error:
        raise InputError("config.not_json", path=path, reason=_short(error)) from None
    if not isinstance(keys, dict):
        raise InputError("config.not_json", path=path, reason=f"top level: {type(keys).__name__}")
    return parse_config(keys)


def parse_config(keys: Mapping[str, Any]) -> ModelConfig:
    """The configuration that the keys of a config.json describe.

    Raises InputError for an unknown architecture, a missing or impossible value, and any key that may
    change the maths and is not implemented.
    """
    family = _family(keys)
    _refuse_unknown(keys)
    for name in _SIZES:
        if name not in keys:
            raise InputError("config.missing_key", name=name)
        _check_size(name, keys[name])
    heads, layers = keys["num_attention_heads"], keys["num_hidden_layers"]
    biased = _flag(keys, "attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURES[family],
        vocab_size=keys["vocab_size"],
        hidden_size=keys["hidden_size"],
        intermediate_size=keys["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_or(keys.get("num_key_value_heads"), heads),
        # Qwen3 does not divide: 128 is the family's size where config.json is silent.
        head_dim=_or(keys.get("head_dim"), 128 if family == "qwen3" else keys["hidden_size"] // heads),
        max_position_embeddings=keys.get("max_position_embeddings", 32768),
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=_flag(keys, "tie_word_embeddings"),
        rope=RopeConfig.parse(keys),
        qkv_bias=family == "qwen2" or biased,
        o_bias=family != "qwen2" and biased,
        mlp_bias=_flag(keys, "mlp_bias"),
        qk_norm=family == "qwen3",
        windows=_windows(keys, family, layers),
    )


def _family(keys: Mapping[str, Any]) -> str:
    named = keys.get("architectures")
    names = named if isinstance(named, list) and named else [ARCHITECTURES.get(str(keys.get("model_type")))]
    for family, architecture in ARCHITECTURES.items():
        if architecture == names[0]:
            return family
    known = ", ".join(ARCHITECTURES.values())
    raise InputError("config.architecture", name=_short(names[0] or keys.get("model_type")), known=known)


def _refuse_unknown(keys: Mapping[str, Any]) -> None:
    if keys.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError("config.unsupported", name="hidden_act", value=_short(keys["hidden_act"]))
    if keys.get("is_causal") is False:
        raise InputError("config.unsupported", name="is_causal", value=False)
    own_code = keys.get("auto_map")
    if isinstance(own_code, dict) and any(str(name).startswith("AutoModel") for name in own_code):
        raise InputError("config.unsupported", name="auto_map", value=_short(own_code))
    for name in ("quantization_config", "compression_config"):
        if keys.get(name):
            raise InputError("config.quantized", method=_quantized_by(keys[name]))
    for name, value in keys.items():
        known = name in _READ or name in _HARMLESS or name.startswith("_")
        if not known and value not in (None, False, [], {}, ""):
            raise InputError("config.unsupported", name=_short(name), value=_short(value))


def _quantized_by(described: Any) -> str:
    """The method (gptq, awq, compressed-tensors, fp8, bitsandbytes ...) that a checkpoint says it went through."""
    if not isinstance(described, dict):
        return _short(described)
    if "load_in_4bit" in described or "load_in_8bit" in described:
        return "bitsandbytes"  # older ones do not say
    return _short(described.get("quant_method", described))


def _windows(keys: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral: a window on every layer; Qwen: behind `use_sliding_window`, from `max_window_layers` up.

    4096 and 28 are the families' own defaults where config.json is silent.
    """
    switched_on = family == "mistral" or (family != "llama" and _flag(keys, "use_sliding_window"))
    window = keys.get("sliding_window", 4096) if switched_on else None
    types = keys.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention") if window is not None else ("full_attention",)
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise InputError("config.unsupported", name="layer_types", value=_short(types))
    if window is None:
        return ()
    first = 0 if family == "mistral" else keys.get("max_window_layers", 28)
    if type(window) is not int or window < 1 or type(first) is not int:
        raise InputError("config.size", name="sliding_window", value=_short((window, first)))
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if i >= first else None for i in range(layers))


def _check_size(name: str, value: Any) -> None:
    most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
    if type(value) is not int or not 1 <= value <= most:
        raise InputError("config.size", name=name, value=_short(value))


def _flag(keys: Mapping[str, Any], name: str) -> bool:
    value = keys.get(name)
    if value is not None and type(value) is not bool:
        raise InputError("config.size", name=name, value=_short(value))
    return bool(value)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
