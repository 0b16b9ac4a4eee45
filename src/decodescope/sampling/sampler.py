"""Sampler: the ordered chain of filters and the seeded draw."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodescope.errors import FindingError, InputError
from decodescope.sampling import filters
from decodescope.sampling.draw import DrawStream
from decodescope.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class StageLogits:
    """The logits [V] after one stage of the chain."""

    name: str
    value: float | int
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """One token chosen, and how: the raw logits [V] (float32) and those after every stage."""

    token_id: int
    raw: Tensor
    stages: tuple[StageLogits, ...]
    drawn: bool  # at random, not by argmax
    forced: bool = False  # by hand

    @property
    def final(self) -> Tensor:
        """The logits [V] the choice was made from."""
        return self.stages[-1].logits if self.stages else self.raw


class Sampler:
    """Chooses tokens for one sequence. `params` may be replaced between two steps.

    With the same seed it draws what `torch.manual_seed(seed)` followed by transformers' `generate` draws. `draws`
    counts the draws made; whoever goes back or forth sets it, and the next draw is the one of that number.
    """

    def __init__(self, params: SamplingParams, stream: DrawStream | None = None) -> None:
        """`stream` is that of all rows with this seed; without one the sampler has its own.

        Raises ValueError for a stream of another seed.
        """
        if stream is None:
            stream = DrawStream(secrets.randbits(32) if params.seed is None else params.seed)
        if params.seed not in (None, stream.seed):
            raise ValueError(f"a sampler of seed {params.seed} cannot draw from the stream of seed {stream.seed}")
        self.params = params
        self.seed = stream.seed
        self.draws = 0
        self._stream = stream

    def choose(self, logits: Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Choice:
        """Choose the next token from raw logits [V] of any dtype.

        Raises FindingError for logits with NaN or +inf, or nothing but -inf; InputError where the settings
        leave nothing to choose.
        """
        raw = logits.detach().to("cpu", torch.float32)
        if not math.isfinite(raw.numpy().max()):
            raise FindingError(
                "run.nonfinite", step=len(generated), dtype=str(logits.dtype).removeprefix("torch.")
            )
        history = _History.of(self.params, prompt, generated)
        stages: list[StageLogits] = []
        current = raw
        for name in self.params.chain():
            value = getattr(self.params, name)
            current = _apply(name, current, value, history)
            stages.append(StageLogits(name, value, current))
        if stages and not math.isfinite(current.numpy().max()):
            raise InputError("sampling.nothing_left", step=len(generated))
        token_id = int(current.numpy().argmax()) if self.params.is_greedy else self._draw(current)
        return Choice(token_id, raw, tuple(stages), drawn=not self.params.is_greedy)

    def _draw(self, logits: Tensor) -> int:
        token_id = self._stream.winner(self.draws, logits.softmax(-1))
        self.draws += 1
        return token_id


@dataclass(frozen=True, slots=True)
class _History:
    """The token ids that stages look back at."""

    all: Sequence[int]  # prompt and generated
    recent: Sequence[int]  # of all, those that the repetition penalty sees
    counted: Sequence[int]  # those that presence and frequency penalty count

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> "_History":
        ids = [*prompt, *generated]
        window = params.window or len(ids)
        counted = ids if params.preset.counts_prompt else generated
        return cls(ids, ids[-window:], counted[-window:])


def _apply(name: str, logits: Tensor, value: float, history: _History) -> Tensor:
    match name:
        case "repetition_penalty":
            return filters.repetition_penalty(logits, history.recent, value)
        case "presence_penalty":
            return filters.presence_penalty(logits, history.counted, value)
        case "frequency_penalty":
            return filters.frequency_penalty(logits, history.counted, value)
        case "no_repeat_ngram_size":
            return filters.no_repeat_ngram(logits, history.all, int(value))
        case "temperature":
            return filters.temperature(logits, value)
        case "top_k":
            return filters.top_k(logits, int(value))
        case "top_p":
            return filters.top_p(logits, value)
        case "min_p":
            return filters.min_p(logits, value)
    raise ValueError(f"no filter called {name}")
