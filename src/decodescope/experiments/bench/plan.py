"""What `bench` is to measure: axes, one at a time, in three sizes; and the cases that each axis compares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from decodescope.errors import InputError
from decodescope.experiments.bench.messages import STORED, Contender, DecodeTask, PrefillTask
from decodescope.experiments.peers.known import Peer
from decodescope.model.precision import DTYPES, QUANTIZE

AXES = ("load", "context", "batch", "recording", "prefill", "cache", "kernels", "format", "against")
FORMATS = (STORED, *DTYPES, *(name for name in QUANTIZE if name != "none"))
SHORT = 32  # tokens of context where another axis is looked at
LONG = 512  # tokens of a prompt where another axis is looked at: a chunk of the loop's own prefill
_MOST = 1 << 20  # of any number that is asked for


def _known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError("bench.unknown_name", option=option, name=name, known=", ".join(known))


@dataclass(frozen=True, slots=True)
class Plan:
    """An axis ends after `rounds` rounds, or earlier once it has taken `axis_s` seconds and two of them are done.

    A decode lasts about `measure_s` seconds, but not longer than `new_tokens` behind the first.
    """

    axes: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    cache_lengths: tuple[int, ...]
    new_tokens: int
    rounds: int
    measure_s: float
    axis_s: float
    load_rounds: int = 2
    formats: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        for name, numbers in (("context", self.contexts), ("batch", self.batches), ("prefill", self.prefills)):
            if not all(0 < number <= _MOST for number in numbers):
                raise InputError("bench.number", name=f"--{name}", value=",".join(map(str, numbers)), most=_MOST)
        for name, number in (("rounds", self.rounds), ("max-new-tokens", self.new_tokens)):
            if not 0 < number <= _MOST:
                raise InputError("bench.number", name=f"--{name}", value=number, most=_MOST)
        _known("--only", self.axes, AXES)
        _known("--formats", self.formats, FORMATS)


QUICK = Plan(
    axes=("context", "batch", "recording", "prefill", "format", "against"),
    contexts=(32, 1024),
    batches=(1, 4),
    prefills=(32, 512),
    cache_lengths=(32, 64),
    new_tokens=16,
    rounds=3,
    measure_s=0.5,
    axis_s=6,
    load_rounds=1,
)
DEFAULT = Plan(
    axes=AXES,
    contexts=(32, 1024, 8192, 32768),
    batches=(1, 2, 4, 8, 16),
    prefills=(32, 512, 4096),
    cache_lengths=(32, 128, 256),
    new_tokens=32,
    rounds=5,
    measure_s=1,
    axis_s=30,
)
FULL = replace(
    DEFAULT, formats=FORMATS, cache_lengths=(32, 128, 512, 1024), rounds=9, measure_s=2, axis_s=300, load_rounds=3
)


def settle(size: Plan, changes: Mapping[str, Any]) -> Plan:
    """A size with what the user asked for otherwise; None changes nothing. Fixed rounds are all made, however long
    they take. Raises InputError."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "rounds" in given:
        given["axis_s"] = float("inf")
    return replace(size, **given)


@dataclass(frozen=True, slots=True)
class Case:
    """One contender at one task of an axis."""

    axis: str
    contender: Contender
    task: DecodeTask | PrefillTask

    def turned(self, turn: int, new_tokens: int) -> DecodeTask | PrefillTask:
        """The task of a round: prompts to be read begin with another token each time, or an engine that remembers
        the last one would have nothing to do."""
        if isinstance(self.task, DecodeTask):
            return replace(self.task, new_tokens=new_tokens)
        first, *rest = self.task.prompt
        return PrefillTask((rest[turn % len(rest)] if rest else first, *rest))


@dataclass(frozen=True, slots=True)
class Cases:
    """What a plan compares, for one model: our `base` contender, `ids` to make prompts of, its `most` positions,
    and whether there are `compiled` kernels here."""

    plan: Plan
    base: Contender
    ids: tuple[int, ...]
    most: int
    compiled: bool

    def of(self, axis: str) -> list[Case]:
        """The cases of an axis, which take turns; none where it has nothing to compare."""
        match axis:
            case "context":
                return self._context()
            case "batch":
                return [Case(axis, self.base, self._decode(rows)) for rows in self.plan.batches]
            case "recording":
                return [Case(axis, self.base, replace(self._decode(), recording=on)) for on in (False, True)]
            case "prefill":
                return self._prefill()
            case "kernels" | "format" | "against":
                contenders = [self.base, *self._others(axis)]
                return self._both(axis, contenders) if len(contenders) > 1 else []
        return []

    def prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """That many ids, going round."""
        return tuple(islice(cycle(self.ids), start, start + length))

    def _context(self) -> list[Case]:
        room = self.most - self.plan.new_tokens - 1
        lengths = dict.fromkeys(min(context, room) for context in self.plan.contexts)
        return [Case("context", self.base, self._behind(length)) for length in lengths if length > 0]

    def _prefill(self) -> list[Case]:
        lengths = dict.fromkeys(min(length, self.most - 1) for length in self.plan.prefills)
        return [Case("prefill", self.base, PrefillTask(self.prompt(length))) for length in lengths]

    def _others(self, axis: str) -> list[Contender]:
        """What our base contender is compared with."""
        if axis == "kernels":
            return [replace(self.base, portable=True)] if self.compiled else []
        if axis == "format":
            return [replace(self.base, format=name) for name in self.plan.formats if name != self.base.format]
        return [contender for peer in self.plan.peers for contender in peer.contenders]

    def _both(self, axis: str, contenders: Sequence[Contender]) -> list[Case]:
        """Decode and prefill of every contender; against others ours records, as it does in every run."""
        long, cases = PrefillTask(self.prompt(min(LONG, self.most - 1))), list[Case]()
        for each in contenders:
            decode = replace(self._decode(), recording=axis == "against" and each == self.base)
            cases += [Case(axis, each, decode), Case(axis, each, long)]
        return cases

    def _decode(self, rows: int = 1) -> DecodeTask:
        """Behind a short prompt, another one in every row."""
        short = min(SHORT, self.most - self.plan.new_tokens - 1)
        return DecodeTask(tuple(self.prompt(short, row) for row in range(rows)), self.plan.new_tokens)

    def _behind(self, context: int) -> DecodeTask:
        """A short context is read; for a long one the cache is filled."""
        if context <= SHORT:
            return DecodeTask((self.prompt(context),), self.plan.new_tokens)
        return DecodeTask((self.prompt(1),), self.plan.new_tokens, filled=context - 1)
