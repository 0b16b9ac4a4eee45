"""The random numbers behind a draw: those of `torch.manual_seed(seed)` and `torch.multinomial`, at less cost."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.floating[Any]]


class DrawStream:
    """All draws of one seed. Draw `n` gives every entry of the vocabulary an exponential variate e, and the
    largest p / e wins, as in `torch.multinomial`.

    Rows that draw in step may share one stream: the variates of its latest draw are made once. Asking for an
    earlier draw starts again from the seed and skips.
    """

    def __init__(self, seed: int, uniform: bool | None = None) -> None:
        """`uniform`: make uniform numbers, and exponential ones of the few that may win. None: where that is
        the same in this build of torch."""
        self.seed = seed
        self._uniform = exponential_is_a_logarithm() if uniform is None else uniform
        self._generator = torch.Generator()
        self._made = 0  # draws whose variates were made since the seed
        self._latest = torch.empty(0, dtype=torch.float64 if self._uniform else torch.float32)

    def winner(self, number: int, probs: Tensor) -> int:
        """The entry that draw `number`, counted from 0, takes from probabilities [V] (float32, CPU)."""
        variates, p = self._variates(number, len(probs)), probs.numpy()
        return _winner_by_bound(p, variates) if self._uniform else int((p / variates).argmax())

    def _variates(self, number: int, size: int) -> Numbers:
        """The variates [V] of one draw: uniform in float64, or exponential in float32."""
        if size != len(self._latest) or number < self._made - 1:
            self._generator.manual_seed(self.seed)
            self._latest, self._made = self._latest.new_empty(size), 0
        while self._made <= number:
            if self._uniform:
                self._latest.uniform_(generator=self._generator)
            else:
                self._latest.exponential_(1, generator=self._generator)
            self._made += 1
        variates: Numbers = self._latest.numpy()
        return variates


def _winner_by_bound(p: Numbers, u: Numbers) -> int:
    """The entry with the largest p / e. As e = -log1p(-u) >= u, only one whose p / u reaches some p / e can."""
    bound = p / u
    first = bound.argmax()
    reach = float(p[first] / _exponential(u[first])) * (1 - 1e-6)  # less by far more than float32 rounds away
    able = np.flatnonzero(bound >= reach)
    return int(able[(p[able] / _exponential(u[able])).argmax()])


def _exponential(u: Any) -> Any:
    """Exponential variates of rate 1 from uniform ones, rounded as torch rounds them."""
    return (-np.log1p(-u)).astype(np.float32)


@cache
def exponential_is_a_logarithm() -> bool:
    """Whether torch's `exponential_` equals -log1p(-u) of the same generator's uniform numbers, bit for bit.

    So it is where torch draws one by one; a build with another kernel (a vector library's) must use that kernel.
    """
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    theirs = torch.empty(5000).exponential_(1, generator=one)
    ours = _exponential(torch.empty(5000, dtype=torch.float64).uniform_(generator=other).numpy())
    return bool((theirs.numpy() == ours).all()) and torch.equal(one.get_state(), other.get_state())
