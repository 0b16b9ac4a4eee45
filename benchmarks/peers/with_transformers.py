"""transformers: a hand-written loop, forward hooks, `generate`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decodescope import Session
from decodescope.text.chat import Prompt
from peers.decoding import SITES, Seen, Step, Ticker, Values, greedy


def transformers_model(session: Session) -> Any:
    """transformers' own model around the very tensors of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(session.files.path.parent, gguf_file=session.files.path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(session.model.state_dict(), assign=True)
    model.generation_config = GenerationConfig()
    return model.eval()


def transformers_tokenizer(session: Session) -> Any:
    """nnsight and TransformerLens ask for one; nothing here is tokenised with it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(session.files.path.parent, gguf_file=session.files.path.name)


def module_paths(layers: int) -> dict[str, str]:
    """Address of each common value -> the transformers module whose output it is, in order of computation."""
    paths = {
        f"layers.{layer}.{site}": f"model.layers.{layer}.{module}".rstrip(".")
        for layer in range(layers)
        for site, (module, _) in SITES.items()
    }
    return {**paths, "logits": "lm_head"}


def first(output: Any) -> Tensor:
    """An attention module returns its weights too."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def cached_step(model: Any) -> Step:
    """transformers' model with its own cache, called as in a hand-written loop."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def step(ids: list[int]) -> tuple[Tensor, Values]:
        new = torch.tensor([ids[cache.get_seq_length() :]])
        return model(new, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1], {}

    return step


@torch.inference_mode()
def bare(model: Any, prompt: Prompt, count: int) -> Seen:
    """The bare model in a loop."""
    return greedy(cached_step(model), prompt.ids, count)


@torch.inference_mode()
def hooks(model: Any, prompt: Prompt, count: int) -> Seen:
    """The same loop with a forward hook on every module whose output is wanted."""
    now: Values = {}
    inner = cached_step(model)

    def hook(address: str) -> Callable[[Any, Any, Any], None]:
        return lambda _module, _inputs, output: now.update({address: first(output)})

    def step(ids: list[int]) -> tuple[Tensor, Values]:
        now.clear()
        logits, _ = inner(ids)
        return logits, dict(now)

    paths = module_paths(model.config.num_hidden_layers)
    handles = [model.get_submodule(path).register_forward_hook(hook(address)) for address, path in paths.items()]
    try:
        return greedy(step, prompt.ids, count)
    finally:
        for handle in handles:
            handle.remove()


def generate(model: Any, prompt: Prompt, count: int, **settings: bool) -> Seen:
    """`generate`, with what it offers to return."""
    ticker, ids = Ticker(), torch.tensor([prompt.ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        streamer=ticker,
        return_dict_in_generate=True,
        **settings,
    )
    held = {"logits": out.logits[-1]} if out.logits else {}
    held |= {f"hidden.{i}": value for i, value in enumerate(out.hidden_states[-1] if out.hidden_states else ())}
    return Seen(out.sequences[0, len(prompt.ids) :].tolist(), ticker.seconds, held=held)
