"""What all ways of decoding have in common: what is to be kept, the timed greedy loop, what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

Values = dict[str, Tensor]
Step = Callable[[list[int]], tuple[Tensor, Values]]  # all ids so far -> the next position's logits, what was kept

# Our site: the submodule of a transformers layer whose output it is, and TransformerLens' name for it.
SITES = {
    "q": ("self_attn.q_proj", "attn.q.hook_out"),
    "k": ("self_attn.k_proj", "attn.k.hook_out"),
    "v": ("self_attn.v_proj", "attn.v.hook_out"),
    "attn_out": ("self_attn", "hook_attn_out"),
    "mlp_out": ("mlp", "hook_mlp_out"),
    "resid_post": ("", "hook_resid_post"),
}


@dataclass(slots=True)
class Seen:
    """What one way of decoding chose, how long its tokens took, and what it kept."""

    ids: list[int]
    seconds: list[float]
    kept: dict[int, Values] = field(default_factory=dict)  # of every step, where the values are the common ones
    held: Values = field(default_factory=dict)  # all that was kept of the last step


def greedy(step: Step, prompt: list[int], count: int, *, timed_from: int = 1) -> Seen:
    """Decode `count` tokens. The first step, which reads the prompt, is left out of the times by default and of
    what is kept always."""
    seen = Seen([], [])
    for number in range(count):
        begun = time.perf_counter()
        logits, values = step([*prompt, *seen.ids])
        seen.ids.append(int(logits.argmax()))
        if number >= timed_from:
            seen.seconds.append(time.perf_counter() - begun)
        if number:
            seen.kept[number] = values
    seen.held = seen.kept[count - 1]
    return seen


class Ticker:
    """A streamer for transformers' `generate`: when the prompt and each new token came."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None: ...

    @property
    def seconds(self) -> list[float]:
        """Of every new token behind the first."""
        return [after - before for before, after in pairwise(self.moments[1:])]
