"""Guards watch a run step by step, and warn, stop it, or change its temperature (rules: `analysis.guard_rules`).

A guard acts once in an episode. That begins when its rule is met, and is over when the mean is beyond `release`
(hysteresis), or when there has been no loop for `window` steps; then a temperature goes back. After each change
the window fills anew: no guard changes its mind within one.

The temperature in force is the run's own, taken through the guards that hold it, in the order of the rules: each
raises it to its own or lowers it to its own, or leaves it where it is beyond that already. So of several that
raise the highest holds, and between a raise and a lowering the later rule has the last word. A guard that would
not move it waits until it would. Where the run is stopped, nothing else is changed.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from decodescope.analysis.guard_rules import GUARD_LOOP_TOKENS, GuardRule
from decodescope.analysis.repeats import Loop, LoopFinder
from decodescope.trace.records import Action, Intervention, Step


class Guards:
    """The guards of one run. Shown every step in order, they say what is to be done from the next step on."""

    def __init__(self, rules: Sequence[GuardRule]) -> None:
        self._rules = tuple(rules)
        self._forget()

    def _forget(self) -> None:
        self._seen: list[tuple[Step, float]] = []
        self._guards = [_Guard(rule) for rule in self._rules]
        self._own = 0.0
        self._in_force: float | None = None

    @property
    def temperature(self) -> float | None:
        """The temperature in force from the next step on; None before the first step."""
        return self._in_force

    def see(self, step: Step, temperature: float) -> tuple[Intervention, ...]:
        """Look at the newest step; `temperature` is in force for the next one, unless this changes it.

        One that the guards have not set themselves becomes the run's own, to which they return.
        """
        self._seen.append((step, temperature))
        if temperature != self._in_force:
            self._own = self._in_force = temperature
        for guard in self._guards:
            guard.sensor.see(step)
        said = self._said()
        stopped = any(record.action == "stop" for record in said)
        return tuple(said if stopped else said + self._changes())

    def forget_from(self, step: int) -> None:
        """Be as if this step and those after it had not been seen."""
        kept = [seen for seen in self._seen if seen[0].step < step]
        self._forget()
        for seen in kept:
            self.see(*seen)

    def _said(self) -> list[Intervention]:
        """Warnings and stops; their episodes end without a word."""
        due = [(guard, guard.due()) for guard in self._guards if guard.rule.temperature is None]
        records = [guard.turned(action) for guard, action in due if action]
        return [record for record in records if record.action != "release"]

    def _changes(self) -> list[Intervention]:
        """Let the guards take the temperature or give it back; one that would not move it waits."""
        turned: list[Intervention] = []
        for guard in self._guards:
            action = guard.due() if guard.rule.temperature is not None else None
            if action == "release" or (action and self._held(also=guard) != self._held()):
                turned.append(guard.turned(action))
        if turned:
            self._in_force = self._held()
        return [replace(record, temperature=self._in_force) for record in turned]

    def _held(self, also: "_Guard | None" = None) -> float:
        """The run's own temperature, taken through the guards in an episode, and through `also`."""
        temperature = self._own
        for guard in self._guards:
            if guard.on or guard is also:
                temperature = guard.rule.applied(temperature)
        return temperature


class _Guard:
    """A rule and what it has seen; `on` in an episode."""

    def __init__(self, rule: GuardRule) -> None:
        self.rule = rule
        self.sensor = _LoopSensor(rule) if rule.guard == "loop" else _EntropySensor(rule)
        self.on = False

    def due(self) -> Action | None:
        """What the rule asks for now: its action where an episode begins, release where it is over."""
        if not self.sensor.ready:
            return None
        if self.on:
            return "release" if self.sensor.calm else None
        return self.rule.action if self.sensor.met else None

    def turned(self, action: Action) -> Intervention:
        """Begin or end an episode, and look anew."""
        self.on = action != "release"
        compared = self.rule.threshold if self.on else self.rule.release
        record = Intervention(self.rule.guard, action, self.sensor.measured, compared, None)
        self.sensor.restart()
        return record


class _EntropySensor:
    """The mean raw entropy of the last steps, since the last change."""

    def __init__(self, rule: GuardRule) -> None:
        self._rule = rule
        self._sign = -1 if rule.guard == "high_entropy" else 1
        self._window: deque[float] = deque(maxlen=rule.window)

    def see(self, step: Step) -> None:
        self._window.append(step.entropy_nats)

    def restart(self) -> None:
        self._window.clear()

    @property
    def ready(self) -> bool:
        return len(self._window) == self._rule.window

    @property
    def measured(self) -> float:
        return math.fsum(self._window) / len(self._window)

    @property
    def met(self) -> bool:
        return self._sign * (self._rule.threshold - self.measured) > 0

    @property
    def calm(self) -> bool:
        return self._sign * (self.measured - self._rule.release) > 0


class _LoopSensor:
    """Whether the text goes round, and for how many steps it has not."""

    def __init__(self, rule: GuardRule) -> None:
        self._least = rule.window
        self._finder = LoopFinder(GUARD_LOOP_TOKENS)
        self._loop: Loop | None = None
        self._steps = self._without = 0  # since the last change; and how many of the newest are in no loop

    def see(self, step: Step) -> None:
        self._finder.push(step.token_id, step.text)
        self._loop = self._finder.loop
        self._steps += 1
        self._without = 0 if self._loop else self._without + 1

    def restart(self) -> None:
        self._steps = self._without = 0

    @property
    def ready(self) -> bool:
        return self._steps >= self._least

    @property
    def measured(self) -> float:
        return float(self._loop.repeated_tokens if self._loop else self._finder.repeated_tokens)

    @property
    def met(self) -> bool:
        return self._loop is not None

    @property
    def calm(self) -> bool:
        return self._without >= self._least
