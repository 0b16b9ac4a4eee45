"""Tiny random models of every family, made by transformers, saved as checkpoints that both sides load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 97


@dataclass(frozen=True)
class Family:
    name: str
    architecture: str
    settings: dict[str, Any]

    def config(self) -> transformers.PreTrainedConfig:
        config_class = getattr(transformers, f"{self.architecture}Config")
        shape = dict(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        return config_class(**{**shape, **self.settings})

    def reference(self, seed: int = 0) -> transformers.PreTrainedModel:
        """A seeded random model whose logits differ enough that argmax is no tie, biases and norms included."""
        torch.manual_seed(seed)
        model = getattr(transformers, f"{self.architecture}ForCausalLM")(self.config()).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.add_(torch.randn_like(parameter) * 0.15)
        model.generation_config = transformers.GenerationConfig()
        return model

    def save(self, folder: Path) -> transformers.PreTrainedModel:
        model = self.reference()
        model.save_pretrained(folder)
        return model


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


FAMILIES = [
    Family("qwen2-gqa", "Qwen2", dict(num_key_value_heads=2)),
    Family("qwen2-mha-tied", "Qwen2", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    Family("qwen2-mqa", "Qwen2", dict(num_key_value_heads=1)),
    Family(
        "qwen2-window",
        "Qwen2",
        dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    Family("qwen3-gqa", "Qwen3", dict(num_key_value_heads=2, head_dim=16)),
    Family(
        "qwen3-tied-bias",
        "Qwen3",
        dict(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, attention_bias=True),
    ),
    Family("llama-gqa", "Llama", dict(num_key_value_heads=2)),
    Family("llama-mqa-tied", "Llama", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    Family("llama-biases", "Llama", dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True)),
    Family(
        "llama-llama3",
        "Llama",
        dict(
            num_key_value_heads=2,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
    ),
    Family("llama-linear", "Llama", dict(num_key_value_heads=2, **_rope("linear", factor=4.0))),
    Family(
        "qwen2-yarn",
        "Qwen2",
        dict(num_key_value_heads=2, **_rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    ),
    Family("mistral-gqa", "Mistral", dict(num_key_value_heads=2, sliding_window=None)),
    Family("mistral-window", "Mistral", dict(num_key_value_heads=2, sliding_window=6)),
]
BY_NAME = {family.name: family for family in FAMILIES}
