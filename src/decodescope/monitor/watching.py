"""Watching one server: look after look, what it does, and which alerts hold so far."""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from decodescope.errors import InputError
from decodescope.monitor.alerts import ALERTS, Alert
from decodescope.monitor.readings import Between, Figure, Figures, figures_of
from decodescope.monitor.scrape import Address, Scrape, scrape

WINDOW_S = 120.0  # as the recording rules have it
_DOWN = "target_down"
State = Literal["pending", "firing"]


@dataclass(frozen=True, slots=True)
class Raised:
    """An alert whose condition holds: `pending` until it has held as long as its rule asks for."""

    name: str  # as in the rules that `monitor init` writes
    key: str  # of its sentences
    state: State
    measured: float
    limit: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One look: `step_s` after the one before, `window_s` after the one where longer figures begin (0: none yet).

    `fault` says why there are no figures.
    """

    at: str  # ISO 8601, UTC
    url: str
    server: str | None
    models: tuple[str, ...]
    step_s: float
    window_s: float
    figures: Figures
    alerts: tuple[Raised, ...]
    fault: str | None = None


class Watch:
    """The looks at one server within the window, and since when conditions hold."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._looks: deque[Scrape] = deque()
        self._since: dict[str, float] = {}

    def look(self) -> Reading:
        """Look once. Raises InputError as `scrape` does."""
        return self.see(scrape(self._address))

    def see(self, new: Scrape) -> Reading:
        """What a look comes to, beside those before."""
        if self._looks and _began_anew(self._looks[-1], new):
            self._looks.clear()
        last = self._looks[-1] if self._looks else None
        self._looks.append(new)
        while len(self._looks) > 2 and self._looks[1].at <= new.at - WINDOW_S:
            self._looks.popleft()
        step, window = Between(new, last), Between(new, self._looks[0] if last else None)
        figures = figures_of(step, window)
        seconds, alerts = (step.seconds, window.seconds), self._raised(new.at, figures)
        return Reading(_now(), self._address.shown, new.server.name, new.models, *seconds, figures, alerts)

    def lost(self, fault: InputError) -> Reading:
        """A look that failed; the next one that succeeds begins a new stretch."""
        self._looks.clear()
        alerts = self._raised(time.monotonic(), None)
        return Reading(_now(), self._address.shown, None, (), 0.0, 0.0, Figures(), alerts, str(fault))

    def _raised(self, at: float, figures: Figures | None) -> tuple[Raised, ...]:
        """The alerts that hold; None for the figures of a server that cannot be reached."""
        raised = []
        for alert in ALERTS:
            measured = _measured(alert, figures)
            if measured is None:
                self._since.pop(alert.key, None)
                continue
            firing = at - self._since.setdefault(alert.key, at) >= alert.hold_s
            state: State = "firing" if firing else "pending"
            raised.append(Raised(alert.name, alert.key, state, measured, alert.limit))
        return tuple(raised)


def second_look(watch: Watch, every_s: float) -> Reading:
    """Look twice, which rates need, and tell of the second time. Raises InputError as `scrape` does."""
    watch.look()
    time.sleep(every_s)
    return watch.look()


def readings(watch: Watch, every_s: float) -> Iterator[Reading]:
    """Look again and again, for ever; what fails after a first success is told and tried again.

    Raises InputError where the first look fails.
    """
    yield watch.look()
    due = time.monotonic()
    while True:
        now = time.monotonic()
        due = max(due + every_s, now)
        time.sleep(due - now)
        try:
            reading = watch.look()
        except InputError as fault:
            reading = watch.lost(fault)
        yield reading


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _began_anew(old: Scrape, new: Scrape) -> bool:
    """Whether another process answers now: a counter of tokens never falls otherwise."""
    return old.server != new.server or _tokens(new) < _tokens(old)


def _tokens(look: Scrape) -> float:
    names = (*look.server.generated, *(name for names in look.server.prompt for name in names))
    return sum(value for name in names for _, value in look.samples.get(name, ()))


def _loop_share(figures: Figures) -> Figure:
    if not figures.loops:
        return figures.loops
    return figures.loops / max(figures.answers_begun or 0, 1)


Measure = Callable[[Figures], Figure]
# What of the rules can be told from looks at the server alone.
_CONDITIONS: dict[str, tuple[Measure, Callable[[float, float], bool]]] = {
    "ttft_high": (lambda f: f.ttft_p95_s, operator.gt),
    "kv_cache_full": (lambda f: f.kv_cache_usage_ratio, operator.gt),
    "entropy_collapse": (lambda f: f.entropy_nats_mean, operator.lt),
    "entropy_explosion": (lambda f: f.entropy_nats_mean, operator.gt),
    "nonfinite": (lambda f: f.nonfinite_logits, operator.gt),
    "loops": (_loop_share, operator.gt),
    "repetition": (lambda f: f.repetition_ratio_mean, operator.gt),
    "process_memory": (lambda f: f.memory_usage_ratio, operator.gt),
    "device_memory": (lambda f: f.device_memory_usage_ratio, operator.gt),
    "device_hot": (lambda f: f.device_celsius, operator.gt),
}
# The others need a longer history.
UNTOLD = tuple(each.name for each in ALERTS if each.key not in (*_CONDITIONS, _DOWN))


def _measured(alert: Alert, figures: Figures | None) -> Figure:
    """What makes an alert's condition hold now; None where it does not, or cannot be told."""
    if figures is None:
        return 0 if alert.key == _DOWN else None
    if alert.key not in _CONDITIONS:
        return None
    measure, exceeds = _CONDITIONS[alert.key]
    value = measure(figures)
    return value if value is not None and exceeds(value, alert.limit) else None
