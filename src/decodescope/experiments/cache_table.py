"""The KV cache of one run: how it grows, what each layer holds, beside the formula; and what it would cost."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import psutil
import torch

from decodescope.catalogue import CONTEXTS
from decodescope.experiments.cache_records import (
    CacheDtype,
    CacheReport,
    CacheStep,
    GqaSaving,
    LayerCache,
    Room,
)
from decodescope.experiments.passes import counted
from decodescope.live import LiveRun
from decodescope.model.config import ModelConfig
from decodescope.model.cost import CACHE_FORMATS, fit, kv_bytes_per_token
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes
from decodescope.model.placement import devices_of
from decodescope.session import Session
from decodescope.trace.records import Run, Step

_OF_THEIR_OWN = ("cuda", "xpu")  # devices with memory beside the processor's


def watch_cache(session: Session, live: LiveRun) -> Iterator[CacheReport]:
    """Decode the one row of `live`, looking at its cache: the report as far as it has come, after every step and
    once more at the end. Raises what `LiveRun.steps` raises, and ValueError for a run without a cache."""
    (trace,) = live.traces
    steps: list[CacheStep] = []
    report = None
    with counted(session.model) as passes:
        for _, step in live.steps():
            if passes.cache is None:
                raise ValueError("the run uses no cache")
            steps.append(_step(step, steps, passes.token_forwards, trace.run))
            report = _report(session, trace.run, steps, passes.cache)
            yield report
    if report is not None and trace.end is not None:
        yield replace(report, finish_reason=trace.end.finish_reason)


def _step(step: Step, before: Sequence[CacheStep], token_forwards: int, run: Run) -> CacheStep:
    return CacheStep(
        step=step.step,
        token_id=step.token_id,
        text=step.text,
        fed_tokens=token_forwards - sum(earlier.fed_tokens for earlier in before),
        cached_tokens=step.kv.tokens,
        used_bytes=step.kv.used_bytes,
        allocated_bytes=step.kv.allocated_bytes,
        formula_bytes=token_forwards * run.kv_bytes_per_token,
        seconds=step.timing.forward_s + step.timing.sample_s,
    )


def _report(session: Session, run: Run, steps: Sequence[CacheStep], cache: KVCache) -> CacheReport:
    config, devices = session.model.config, devices_of(session.model)
    positions = sum(step.fed_tokens for step in steps)
    layer_bytes = positions * run.kv_bytes_per_token // config.num_hidden_layers
    layers = tuple(layer_cache(cache, layer, layer_bytes) for layer in range(config.num_hidden_layers))
    return CacheReport(
        model=run.model,
        architecture=run.architecture,
        dtype=run.dtype,
        device=run.device,
        prompt_tokens=len(run.prompt_tokens),
        bytes_per_token=cache.position_bytes,
        bytes_per_token_formula=run.kv_bytes_per_token,
        used_bytes=cache.used_bytes,
        allocated_bytes=cache.allocated_bytes,
        formula_bytes=positions * run.kv_bytes_per_token,
        agrees=all(layer.agrees for layer in layers),
        steps=tuple(steps),
        finish_reason=None,
        notes=run.notes,
        layers=layers,
        gqa=gqa_saving(config, run.kv_bytes_per_token),
        cache_dtypes=cache_dtypes(config, run.cache_dtype or run.dtype),
        fit=room(config, held_bytes(session.model), memory_of(devices), (positions, run.kv_bytes_per_token)),
    )


def layer_cache(cache: KVCache, layer: int, formula_bytes: int) -> LayerCache:
    """Measure one layer; what is allocated is the size of the storage behind the tensors."""
    keys, values = cache.held(layer)
    tensors = [tensor for each in (keys, values) for stored in each.stretches for tensor in stored.tensors]
    used = sum(tensor.nbytes for tensor in tensors)
    return LayerCache(
        layer=layer,
        shape=tuple(keys.shape),
        dtype=str(keys.dtype).removeprefix("torch."),
        device=str(keys.device),
        used_bytes=used,
        allocated_bytes=sum(tensor.untyped_storage().nbytes() for tensor in tensors),
        formula_bytes=formula_bytes,
        agrees=used == formula_bytes and keys.shape == values.shape,
    )


def gqa_saving(config: ModelConfig, bytes_per_token: int) -> GqaSaving:
    """Grouped-query attention (https://arxiv.org/abs/2305.13245) against a cache of every query head's own."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return GqaSaving(heads, kv_heads, heads / kv_heads, bytes_per_token, bytes_per_token * heads // kv_heads)


def cache_dtypes(config: ModelConfig, in_use: str) -> tuple[CacheDtype, ...]:
    """The cache in every dtype, by the formula; `in_use` is the one of the run."""
    per_token = {name: kv_bytes_per_token(config, *sizes) for name, sizes in CACHE_FORMATS.items()}
    return tuple(
        CacheDtype(
            dtype=name,
            bytes_per_token=size,
            bytes_at={length: size * length for length in CONTEXTS},
            in_use=name == in_use,
        )
        for name, size in per_token.items()
    )


def room(config: ModelConfig, held: int, memory: tuple[int, int], now: tuple[int, int]) -> Room:
    """How many more tokens fit. `held` bytes are the weights'; `memory` is (total, available) bytes; `now` is
    (tokens held, bytes of each)."""
    total, available = memory
    tokens, per_token = now
    by_memory = available // per_token
    return Room(
        kind="estimated",
        memory_total_bytes=total,
        memory_available_bytes=available,
        context=config.max_position_embeddings,
        tokens_by_memory=by_memory,
        tokens_left=min(by_memory, config.max_position_embeddings - tokens),
        dtypes=fit(config, total, available + held)["dtypes"],
    )


def memory_of(devices: Sequence[torch.device]) -> tuple[int, int]:
    """Bytes of memory where the cache lives: (total, available), of all devices together."""
    if devices[0].type in _OF_THEIR_OWN:
        free, total = zip(*(torch.get_device_module(each).mem_get_info(each) for each in devices), strict=True)
        return sum(total), sum(free)
    memory = psutil.virtual_memory()
    return memory.total, memory.available
