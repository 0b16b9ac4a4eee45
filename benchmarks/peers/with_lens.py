"""TransformerLens: `run_with_cache` once a token."""

import time
from typing import Any

import torch
from torch import Tensor

from decodescope import Session
from decodescope.text.chat import Prompt
from peers.decoding import SITES, Seen, Values, greedy
from peers.with_transformers import transformers_model


def lens_model(session: Session, tokenizer: Any) -> Any:
    """TransformerBridge around a transformers model of its own."""
    from transformer_lens.model_bridge import TransformerBridge

    name = "Qwen/Qwen2.5-Coder-0.5B-Instruct"  # only looked up, the model is given
    model = transformers_model(session)
    bridge = TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer, device="cpu")
    for block in bridge.blocks:
        block.attn.register_forward_pre_hook(_hand_cache_on, with_kwargs=True)
    return bridge


def _hand_cache_on(_: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers 5.24 calls the cache `cache`; TransformerLens 4.3.0 looks for the old name, finds none and
    decodes as if there were no prompt. Without a cache this changes nothing."""
    return inputs, {**named, "past_key_values": named.get("cache")}


def lens_names(layers: int) -> dict[str, str]:
    """Address of each common value -> TransformerLens' name."""
    names = {
        f"layers.{layer}.{site}": f"blocks.{layer}.{name}"
        for layer in range(layers)
        for site, (_, name) in SITES.items()
    }
    return {**names, "logits": "unembed.hook_out"}


def default(bridge: Any, prompt: Prompt, count: int) -> Seen:
    """`run_with_cache` on the whole sequence for every new token, with nothing set."""
    seen = Seen([], [])
    for _ in range(count):
        begun = time.perf_counter()
        logits, cache = bridge.run_with_cache(torch.tensor([[*prompt.ids, *seen.ids]]))
        seen.ids.append(int(logits[0, -1].argmax()))
        seen.seconds.append(time.perf_counter() - begun)
        seen.held = {name: value for name, value in cache.items() if value is not None}
        del logits, cache
        if len(seen.ids) < count:
            seen.held.clear()  # two of them would not fit into memory
    return seen


@torch.inference_mode()
def whole(bridge: Any, prompt: Prompt, count: int) -> Seen:
    """`run_with_cache` on the whole sequence for every new token, kept: the common values at the last position."""
    names = lens_names(len(bridge.blocks))

    def step(ids: list[int]) -> tuple[Tensor, Values]:
        logits, cache = bridge.run_with_cache(
            torch.tensor([ids]), names_filter=list(names.values()), pos_slice=-1, return_cache_object=False
        )
        return logits[0, -1], {address: cache[name] for address, name in names.items()}

    return greedy(step, prompt.ids, count, timed_from=0)


@torch.inference_mode()
def cached(bridge: Any, prompt: Prompt, count: int) -> Seen:
    """`run_with_cache` on the new token alone, with the KV cache of the tokens before handed in."""
    names = lens_names(len(bridge.blocks))
    past: list[Any] = []

    def step(ids: list[int]) -> tuple[Tensor, Values]:
        if not past:
            logits, cache = bridge(torch.tensor([ids]), use_cache=True, return_type="logits_and_cache")
            past.append(cache)
            return logits[0, -1], {}
        logits, values = bridge.run_with_cache(
            torch.tensor([ids[-1:]]),
            names_filter=list(names.values()),
            past_key_values=past[0],
            return_cache_object=False,
        )
        return logits[0, -1], {address: values[name] for address, name in names.items()}

    return greedy(step, prompt.ids, count)
