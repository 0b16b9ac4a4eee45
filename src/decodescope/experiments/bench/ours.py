"""decodescope as an engine that is timed: the bare loop, the recorded run, a filled cache, no cache at all."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import decodescope
from decodescope.experiments.bench.messages import (
    CacheTask,
    CacheTimes,
    DecodeTask,
    Opened,
    PrefillTask,
    Setup,
    Timed,
)
from decodescope.experiments.cache_curve import CachePlan, compare_lengths
from decodescope.generate import NOTHING, Decoding, Limits, Past
from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import available
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes
from decodescope.options import RunOptions
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from decodescope.session import Session
from decodescope.text.chat import Prompt, PromptToken

_BLOCK = 1024  # random positions


class Engine:
    """A session, timed."""

    def __init__(self, setup: Setup) -> None:
        random = Path(setup.random) if setup.random else None
        self._session = Session.open(setup.path, **{**setup.loading, "random_weights": random})
        model = self._session.model
        self.opened = Opened(
            version=decodescope.__version__,
            activations=self._session.dtype,
            kernels=available().instructions if model.device.type == "cpu" else None,
            weights_bytes=held_bytes(model),
            step_bytes=step_bytes(model),
        )

    def decode(self, task: DecodeTask) -> Timed:
        """Every new token but the first of each row, which comes with the prefill."""
        count = task.new_tokens + 1
        if task.recording:
            return self._recorded(task, count)
        past = self._filled(task.filled) if task.filled else NOTHING
        prompts = [[0] * task.filled + list(prompt) for prompt in task.prompts]
        samplers = [Sampler(SamplingParams()) for _ in prompts]
        decoding = Decoding(self._session.model, prompts, samplers, self._limits(count), past)
        timed = _timed(_bare(decoding), len(prompts))
        return replace(timed, position_bytes=decoding.cache.position_bytes)

    def prefill(self, task: PrefillTask) -> Timed:
        """One prompt, in the loop's own chunks."""
        decoding = Decoding(self._session.model, [task.prompt], [Sampler(SamplingParams())], self._limits(1))
        started = time.perf_counter()
        decoding.forward()
        self._wait()
        return Timed(time.perf_counter() - started, len(task.prompt))

    def cache(self, task: CacheTask) -> CacheTimes:
        """The experiment of `kv`."""
        plan = CachePlan(task.new_tokens, task.lengths)
        pairs = list(compare_lengths(self._session, _prompt(task.prompt), plan))
        return CacheTimes(tuple(cached for cached, _ in pairs), tuple(uncached for _, uncached in pairs))

    def _recorded(self, task: DecodeTask, count: int) -> Timed:
        options = RunOptions(max_new_tokens=count, ignore_eos=True)
        live = self._session.start([_prompt(prompt) for prompt in task.prompts], options)
        steps = ([step.token_id] for row, step in live.steps())
        return replace(_timed(steps, 1), position_bytes=live.cache.position_bytes)

    def _filled(self, positions: int) -> Past:
        """A cache with random keys and values: reading them takes as long whatever they are."""
        model = self._session.model
        cache = KVCache(model.config.num_hidden_layers, self._session.loading.cache_format)
        # With room for the new ones: that a cache grows now and then is not what a step takes.
        block = _random_positions(model, positions + _BLOCK)
        for number, layer in enumerate(model.model.layers):
            both = block.to(next(layer.parameters()).device)
            cache.append(number, both, both)
        cache.advance(positions + _BLOCK)
        cache.truncate(positions)
        return Past((), (0,) * positions, cache)

    def _limits(self, count: int) -> Limits:
        return Limits(count, cache_dtype=self._session.loading.cache_format)

    def _wait(self) -> None:
        device = self._session.model.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def step_bytes(model: CausalLM) -> int:
    """Bytes of weights that one decoding step reads: all that is held but an embedding that is no head."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    return held_bytes(model) - (0 if embedding is head else embedding.nbytes)


def _bare(decoding: Decoding) -> Iterator[list[int]]:
    """The loop alone: forward and choose, nothing observed."""
    while decoding.active:
        decoding.forward()
        yield [decoded.choice.token_id for decoded in decoding.choose()]


def _timed(steps: Iterator[list[int]], rows: int) -> Timed:
    """All steps but the first."""
    ids, started, count = [next(steps)[0]], time.perf_counter(), 0
    for chosen in steps:
        ids.append(chosen[0])
        count += 1
    return Timed(time.perf_counter() - started, count * rows, tuple(ids))


def _random_positions(model: CausalLM, count: int) -> Tensor:
    """Keys or values [1, K, count, d] of one layer: one random block, again and again."""
    config = model.config
    shape = (1, config.num_key_value_heads, _BLOCK, config.head_dim)
    block = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    return block.repeat(1, 1, -(-count // _BLOCK), 1)[:, :, :count]


def _prompt(ids: tuple[int, ...]) -> Prompt:
    """Ids as a prompt; their text does not matter."""
    return Prompt("", tuple(PromptToken(token, "", b"", "text", False, False) for token in ids))
