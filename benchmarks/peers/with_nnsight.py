"""nnsight: `generate` under its tracer."""

from typing import Any

import torch

from decodescope import Session
from decodescope.text.chat import Prompt
from peers.decoding import Seen, Ticker
from peers.with_transformers import first, module_paths, transformers_model


def nnsight_model(session: Session, tokenizer: Any) -> Any:
    """nnsight around a transformers model of its own."""
    from nnsight import TransformersModel

    return TransformersModel(transformers_model(session), tokenizer=tokenizer, task="text-generation")


def reads(model: Any, prompt: Prompt, count: int) -> Seen:
    """`generate`, reading each output in order in a `tracer.iter` loop."""
    import nnsight

    paths = module_paths(model.config.num_hidden_layers)
    watched = [model.get(path) for path in paths.values()]
    ids, ticker = torch.tensor([prompt.ids]), Ticker()
    with model.generate(ids, max_new_tokens=count, do_sample=False, streamer=ticker) as tracer:
        outputs = nnsight.save([])
        for _ in tracer.iter[1:count]:
            outputs.append([envoy.output for envoy in watched])
        result = tracer.result.save()
    kept = {number: dict(zip(paths, map(first, row), strict=True)) for number, row in enumerate(outputs, start=1)}
    return Seen(result[0, len(prompt.ids) :].tolist(), ticker.seconds, kept, kept[count - 1])


def cache_some(model: Any, prompt: Prompt, count: int) -> Seen:
    """`generate` under `tracer.cache` for the same modules."""
    paths = module_paths(model.config.num_hidden_layers)
    watched = [model.get(path) for path in paths.values()]
    ids, ticker = torch.tensor([prompt.ids]), Ticker()
    with model.generate(ids, max_new_tokens=count, do_sample=False, streamer=ticker) as tracer:
        cache = tracer.cache(modules=watched)
        result = tracer.result.save()
    kept = {
        number: {address: first(cache[f"model.{path}"].output[number]) for address, path in paths.items()}
        for number in range(1, count)
    }
    return Seen(result[0, len(prompt.ids) :].tolist(), ticker.seconds, kept, kept[count - 1])


def cache_all(model: Any, prompt: Prompt, count: int) -> Seen:
    """`generate` under `tracer.cache()` as it comes: the output of every module."""
    ids, ticker = torch.tensor([prompt.ids]), Ticker()
    with model.generate(ids, max_new_tokens=count, do_sample=False, streamer=ticker) as tracer:
        cache = tracer.cache()
        result = tracer.result.save()
    outputs = {path: first(cache[path].output[-1]) for path in cache.keys()}  # noqa: SIM118 - the view is no mapping
    tensors = {path: value for path, value in outputs.items() if isinstance(value, torch.Tensor)}
    return Seen(result[0, len(prompt.ids) :].tolist(), ticker.seconds, held=tensors)
