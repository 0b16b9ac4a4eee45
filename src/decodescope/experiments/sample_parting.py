"""Why two rows part: the same past, the same raw logits, and yet another token. One step is chosen again."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decodescope.errors import InputError
from decodescope.experiments.sample_records import Cause, Parting
from decodescope.sampling.draw import DrawStream
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Choice, Sampler

_SETTINGS = tuple(SamplingParams().values())


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a row chose, and its settings; `by_hand`: not by these."""

    token_id: int
    params: SamplingParams
    by_hand: bool = False


class Replay:
    """Choices made again at a step of a sequence, for any settings. Steps are best visited in rising order."""

    def __init__(self) -> None:
        self._streams: dict[int, DrawStream] = {}

    def choose(self, raw: Tensor, prompt: Sequence[int], past: Sequence[int], params: SamplingParams) -> Choice:
        """The choice from raw logits [V] behind `past`, as a row makes it that chose all of it by these settings.

        Raises InputError where they leave nothing to choose.
        """
        stream = None
        if params.seed is not None:
            stream = self._streams.setdefault(params.seed, DrawStream(params.seed))
        sampler = Sampler(params, stream)
        sampler.draws = len(past)
        return sampler.choose(raw, prompt, past)


@dataclass(frozen=True, slots=True)
class Junction:
    """A step at which rows stand with the same past: raw logits [V] (float32) behind it."""

    raw: Tensor
    prompt: Sequence[int]
    past: Sequence[int]
    replay: Replay

    def explain(self, first: Chosen, own: Chosen) -> Parting:
        """Why `own` is not the token of `first`."""
        here, there = self._choice(own.params), self._choice(first.params)
        cause, stage = _cause(first, own, here)
        ids = (own.token_id, first.token_id)
        raw, after_own, after_first = (_probs(logits, ids) for logits in (self.raw, here.final, there.final))
        return Parting(
            step=len(self.past),
            token_id=own.token_id,
            text=None,
            prob_raw=raw[0],
            prob_here=after_own[0],
            prob_there=after_first[0],
            first_token_id=first.token_id,
            first_text=None,
            first_prob_raw=raw[1],
            first_prob_here=after_own[1],
            first_prob_there=after_first[1],
            cause=cause,
            stage=stage,
            repaired_by=() if first.by_hand else self._repairs(first, own),
        )

    def _choice(self, params: SamplingParams) -> Choice:
        return self.replay.choose(self.raw, self.prompt, self.past, params)

    def _repairs(self, first: Chosen, own: Chosen) -> tuple[str, ...]:
        """The settings that make all the difference: each alone, set as in the first row, gives its token."""
        # A row that never drew has no seed: put at a temperature, it draws as the first row does.
        params = own.params if own.params.seed is not None else replace(own.params, seed=first.params.seed)
        found = []
        for name in _differing(first.params, params):
            with suppress(InputError):  # together they may leave nothing to choose
                choice = self._choice(replace(params, **{name: getattr(first.params, name)}))
                if choice.token_id == first.token_id:
                    found.append(name)
        return tuple(found)


def _differing(first: SamplingParams, own: SamplingParams) -> list[str]:
    names = [name for name in _SETTINGS if getattr(first, name) != getattr(own, name)]
    # Where one of the two never drew there is no seed to give.
    return [name for name in names if name != "seed" or first.seed is not None]


def _cause(first: Chosen, own: Chosen, here: Choice) -> tuple[Cause, str | None]:
    if first.by_hand:
        return "by_hand", None
    stage = _removing(here, first.token_id)
    if stage is not None:
        return "removed", stage
    if not own.params.is_greedy:
        if first.params.is_greedy:
            return "drawn", None
        return ("other_probs" if first.params.seed == own.params.seed else "other_seed"), None
    stage = _overtaking(here, first.token_id)
    return ("highest", None) if stage is None else ("lowered", stage)


def _removing(choice: Choice, token_id: int) -> str | None:
    """The stage after which a token is gone."""
    return next((stage.name for stage in choice.stages if stage.logits[token_id] == -math.inf), None)


def _overtaking(choice: Choice, token_id: int) -> str | None:
    """The stage that put the chosen token above another one; None where it was there from the start."""
    behind = [
        not _above(logits, token_id, choice.token_id)
        for logits in (choice.raw, *(stage.logits for stage in choice.stages))
    ]
    if behind[0]:
        return None
    last = max(place for place, is_behind in enumerate(behind) if not is_behind)
    return choice.stages[last].name


def _above(logits: Tensor, token_id: int, other: int) -> bool:
    """Whether argmax prefers `token_id`: of equals the lower id."""
    one, two = float(logits[token_id]), float(logits[other])
    return one > two or (one == two and token_id < other)


def _probs(logits: Tensor, ids: Sequence[int]) -> list[float]:
    probs = torch.softmax(logits.double(), -1)
    return [float(probs[token_id]) for token_id in ids]
