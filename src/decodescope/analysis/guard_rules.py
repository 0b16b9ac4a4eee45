"""The rules of guards, as they are written.

    loop[=ACTION]             a loop of 64 repeated tokens or more (see `analysis.repeats`); without ACTION: stop
    entropy=NATS:ACTION       the window's mean of the raw entropy is below NATS; a temperature raises
    high_entropy=NATS:ACTION  it is above NATS; a temperature lowers
    ,window=STEPS             the steps looked at, 16 unless given
    ,release=NATS             the mean at which an episode is over: half as much again as NATS, or two thirds of it

ACTION is warn, stop or a temperature. What comes of it: `analysis.guards`.

Low entropy is certainty, which is no sign of a loop. Measured with a 0.5B model (tests/data/guard_prompts.json):
of 100 ordinary texts 91 have a window below 1.5 nats and 27 one below 0.01; the lowest is 0.00015 (code), and
that of the loops at 0.0004. So `loop` is the guard against loops. None of the ordinary texts goes above 4.5 nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from decodescope.errors import InputError

GuardName = Literal["loop", "entropy", "high_entropy"]
RuleAction = Literal["warn", "stop", "temperature"]
GUARD_LOOP_TOKENS = 64  # twice what `find_loop` asks for: to tell of a loop costs little, to stop good text much
DEFAULT_WINDOW = 16
_HYSTERESIS = 1.5
_MOST_STEPS, _MOST_TEMPERATURE = 10_000, 100
_SHOWN = 80  # characters of what was given, in a sentence about it


@dataclass(frozen=True, slots=True)
class GuardRule:
    """One rule, complete. `threshold` and `release` are nats, or repeated tokens for the loop guard.

    `temperature` is None unless the action is one. `str()` gives the rule as `parse_guard` reads it.
    """

    guard: GuardName
    action: RuleAction
    threshold: float
    release: float
    window: int
    temperature: float | None = None

    def applied(self, temperature: float) -> float:
        """The temperature while this guard holds it: the guard of high entropy only lowers, others only raise."""
        if self.temperature is None:
            return temperature
        return (min if self.guard == "high_entropy" else max)(temperature, self.temperature)

    def __str__(self) -> str:
        action = self.action if self.temperature is None else f"{self.temperature!r}"
        if self.guard == "loop":
            return f"loop={action},window={self.window}"
        return f"{self.guard}={self.threshold!r}:{action},window={self.window},release={self.release!r}"


def parse_guard(text: str) -> GuardRule:
    """Read a rule as it stands above. Raises InputError, naming what is wrong and what is known."""
    head, *extras = text.split(",")
    name, given, value = head.partition("=")
    if name not in get_args(GuardName):
        raise InputError("guard.unknown", text=text[:_SHOWN], known=", ".join(get_args(GuardName)))
    guard = cast(GuardName, name)
    options = _options(guard, extras)
    window = _window(guard, options.get("window", str(DEFAULT_WINDOW)))
    if guard == "loop":
        tokens = float(GUARD_LOOP_TOKENS)
        action, temperature = _action(guard, value if given else "stop")
        return GuardRule(guard, action, tokens, tokens, window, temperature)
    limit, colon, named = value.partition(":")
    nats = _number(limit)
    if nats is None or nats <= 0 or not colon:
        raise InputError("guard.nats", guard=guard, value=value[:_SHOWN])
    action, temperature = _action(guard, named)
    return GuardRule(guard, action, nats, _release(guard, nats, options.get("release")), window, temperature)


def _options(guard: GuardName, extras: Sequence[str]) -> dict[str, str]:
    known = ("window",) if guard == "loop" else ("window", "release")
    options: dict[str, str] = {}
    for extra in extras:
        name, _, value = extra.partition("=")
        if name not in known or name in options:
            key = "guard.option_twice" if name in options else "guard.option"
            raise InputError(key, guard=guard, name=name[:_SHOWN], known=", ".join(known))
        options[name] = value
    return options


def _window(guard: GuardName, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= _MOST_STEPS):
        raise InputError("guard.window", guard=guard, value=text[:_SHOWN], most=_MOST_STEPS)
    return int(text)


def _action(guard: GuardName, text: str) -> tuple[RuleAction, float | None]:
    if text in ("warn", "stop"):
        return cast(RuleAction, text), None
    temperature = _number(text)
    if temperature is None:
        raise InputError("guard.action", guard=guard, value=text[:_SHOWN])
    lowers = guard == "high_entropy"
    if not 0 <= temperature <= _MOST_TEMPERATURE or not (temperature or lowers):
        key = "guard.lower_to" if lowers else "guard.raise_to"
        raise InputError(key, guard=guard, value=text[:_SHOWN], most=_MOST_TEMPERATURE)
    return "temperature", temperature


def _release(guard: GuardName, nats: float, text: str | None) -> float:
    """Where the episode is over: above the threshold of a low entropy, below that of a high one."""
    high = guard == "high_entropy"
    if text is None:
        return nats / _HYSTERESIS if high else nats * _HYSTERESIS
    release = _number(text)
    if release is None or not (0 < release < nats if high else release > nats):
        key = "guard.release_below" if high else "guard.release_above"
        raise InputError(key, guard=guard, value=text[:_SHOWN], nats=f"{nats:g}")
    return release


def _number(text: str) -> float | None:
    """A finite number, or None; also for one between spaces, which separate the rules in a run's header."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and text == text.strip() else None
