"""One pass of a tiny model, every inner value of it kept."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from decodescope.analysis.lens import Unembedding
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.observe.recording import Recording, Watch


def watched_pass(folder: Path, dtype: str, tokens: int = 12) -> tuple[CausalLM, Recording, Tensor]:
    """The model, what was kept of a pass over seeded ids, and the logits [T, V] of all its positions."""
    model, _ = load_model(folder, dtype)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(5))
    kept = ("embed", "z", "attn_out", "mlp_out", "resid_post")
    recording = Recording(model.config, Watch(kept))
    tap = recording.begin(0, 0, tokens, True)
    logits = model(ids, every_logit=True, tap=tap)
    recording.end()
    return model, recording, logits[0]


def unembedding(model: CausalLM) -> Unembedding:
    return Unembedding(model.model.norm.weight, model.model.norm.eps, model.lm_head.weight)


def of_layers(model: CausalLM, recording: Recording, site: str) -> Iterator[Tensor]:
    return (recording[f"layers.{i}.{site}"][0] for i in range(model.config.num_hidden_layers))
