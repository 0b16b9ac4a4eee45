"""Runs of tiny models that are looked at, without text: ids in, logits, cache and recording out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodescope.generate import Decoding, Limits
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.observe.recording import Recording, Watch
from decodescope.observe.selection import Place, places
from decodescope.probe import BY_NAME
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from families import VOCABULARY
from site_references import visible

CPU = torch.device("cpu")


def prompt_ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Run:
    ids: list[int]  # generated
    logits: list[Tensor]  # V, of each step
    cache: KVCache
    recording: Recording | None


def run(model: CausalLM, prompt: list[int], watch: Watch | None = None, steps: int = 3, **limits: Any) -> Run:
    """Decode greedily, as a session does it."""
    decoding = Decoding(model, [prompt], [Sampler(SamplingParams())], Limits(steps, **limits))
    recording = None if watch is None else Recording(model.config, watch)
    ids, logits = [], []
    while decoding.active:
        if recording is not None:
            decoding.tap = recording.begin(len(ids), *decoding.next_pass(), decoding.limits.every_logit)
        decoding.forward()
        if decoding.tap is not None:
            recording.end()
        (decoded,) = decoding.choose()
        ids.append(decoded.choice.token_id)
        logits.append(decoded.choice.raw)
    return Run(ids, logits, decoding.cache, recording)


def one_pass(model: CausalLM, ids: list[int], watch: Watch) -> Recording:
    """A pass over a prompt with all its logits; nothing is chosen, so they may be no numbers."""
    recording = Recording(model.config, watch)
    model(torch.tensor([ids]), every_logit=True, tap=recording.begin(0, 0, len(ids), every_logit=True))
    recording.end()
    return recording


def sizes(model: CausalLM, rows: int, T: int, S: int, every_logit: bool = False) -> dict[Place, tuple[int, ...]]:
    """The shape that every value of a pass has by its letters in `probe.SITES`."""
    config = model.config
    letters = dict(
        B=rows, T=T, S=S, D=config.hidden_size, H=config.num_attention_heads, K=config.num_key_value_heads,
        d=config.head_dim, F=config.intermediate_size, V=config.vocab_size,
    )  # fmt: skip
    found = {}
    for site, layer in places(config):
        last_only = site in ("final_norm", "logits") and not every_logit
        here = letters | ({"T": 1} if last_only else {})
        found[site, layer] = tuple(here[letter] for letter in BY_NAME[site].shape.split())
    return found


def unmasked(model: CausalLM, place: Place, value: Tensor) -> Tensor:
    """The elements of a kept value that count: of scores and pattern only what a row may look at."""
    site, layer = place
    if site not in ("scores", "pattern"):
        return value.flatten()
    looks = visible(*value.shape[-2:], (0,), model.config.window(layer))[0]  # 1 T S
    return value[looks.expand(value.shape)]
