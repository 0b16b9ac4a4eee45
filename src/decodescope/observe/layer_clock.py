"""LayerClock: what each layer of a pass takes, measured while another tap looks at the same pass."""

import time

import torch

from decodescope.observe.clock import memory_now, wait_for
from decodescope.probe import Attended, Shown, Tap
from decodescope.trace.records import Memory
from decodescope.trace.site_records import LayerCost

_ENDS = ("resid_post", "logits")  # of a layer, and of the pass


class LayerClock:
    """A tap around another one: seconds and memory of every layer, without the seconds the other tap takes."""

    def __init__(self, inner: Tap) -> None:
        self.costs: list[LayerCost] = []
        self._inner = inner
        self._memory: dict[int | None, Memory] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """The passes of a step start now."""
        self._step = step
        self._seconds: dict[int | None, float] = {}
        self._looking, self._since = 0.0, time.perf_counter()

    def end(self) -> None:
        """The passes of the step are over; the chunks of a long prompt count together."""
        self.costs = [cost for cost in self.costs if cost.step != self._step]
        self.costs += [
            LayerCost(self._step, layer, seconds, self._memory[layer]) for layer, seconds in self._seconds.items()
        ]

    def forget_from(self, step: int) -> None:
        """What was measured of `step` and later ones is of no branch any more."""
        self.costs = [cost for cost in self.costs if cost.step < step]

    def wants(self, site: str, layer: int | None) -> bool:
        """What the other tap wants, and what ends a layer or the pass."""
        return site in _ENDS or self._inner.wants(site, layer)

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """Stop the clock where a layer ends, and while the other tap looks."""
        ends = site in _ENDS
        device = value.z.device if isinstance(value, Attended) else value.device
        arrived = _now(device)
        if ends:
            spent = arrived - self._since - self._looking
            self._seconds[layer] = self._seconds.get(layer, 0.0) + spent
            self._memory[layer] = memory_now(device)
        if self._inner.wants(site, layer):
            self._inner.receive(site, layer, value)
        now = _now(device)
        self._looking, self._since = (0.0, now) if ends else (self._looking + now - arrived, self._since)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done all that it was given: neither's work is counted as the other's."""
    wait_for(device)
    return time.perf_counter()
