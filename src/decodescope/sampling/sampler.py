"""Sampler: the ordered chain of filters and the seeded draw."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodescope.errors import FindingError, InputError
from decodescope.sampling import filters
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
    """Chooses tokens for one sequence; owns the random stream of that sequence.

    With the same seed it draws what `torch.manual_seed(seed)` followed by transformers' `generate` draws:
    both give every entry of the vocabulary an exponential variate e and take the largest p / e.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._generator = torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Choice:
        """Choose the next token from raw logits [V] of any dtype.

        Raises FindingError for logits with NaN or +inf, or nothing but -inf; InputError where the settings
        leave nothing to choose.
        """
        raw = logits.detach().to("cpu", torch.float32)
        if not math.isfinite(raw.max()):
            raise FindingError(
                "run.nonfinite", step=len(generated), dtype=str(logits.dtype).removeprefix("torch.")
            )
        stages: list[StageLogits] = []
        current = raw
        for name in self.params.chain():
            value = getattr(self.params, name)
            current = _apply(name, current, value, prompt, generated)
            stages.append(StageLogits(name, value, current))
        if not math.isfinite(current.max()):
            raise InputError("sampling.nothing_left", step=len(generated))
        token_id = int(current.argmax()) if self.params.is_greedy else self._draw(current)
        return Choice(token_id, raw, tuple(stages), drawn=not self.params.is_greedy)

    def state(self) -> Tensor:
        """Where the random stream stands; `restore` returns to it."""
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def _draw(self, logits: Tensor) -> int:
        probs = logits.softmax(-1)
        waits = torch.empty_like(probs).exponential_(1, generator=self._generator)
        return int((probs / waits).argmax())


def _apply(name: str, logits: Tensor, value: float, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    match name:
        case "repetition_penalty":
            return filters.repetition_penalty(logits, [*prompt, *generated], value)
        case "presence_penalty":
            return filters.presence_penalty(logits, generated, value)
        case "frequency_penalty":
            return filters.frequency_penalty(logits, generated, value)
        case "no_repeat_ngram_size":
            return filters.no_repeat_ngram(logits, [*prompt, *generated], int(value))
        case "temperature":
            return filters.temperature(logits, value)
        case "top_k":
            return filters.top_k(logits, int(value))
        case "top_p":
            return filters.top_p(logits, value)
        case "min_p":
            return filters.min_p(logits, value)
    raise ValueError(f"no filter called {name}")
