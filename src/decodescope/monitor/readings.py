"""What a server does now: the figures behind its counters, from two looks at them or more.

Rates, quantiles and means are over the time between two looks; a server that was started anew between them counts
from nothing. Quantiles are estimates: a histogram only tells in which bucket a value fell, and within it all
values are taken to lie evenly, as Prometheus does. So an estimate can be wrong by the width of its bucket.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from decodescope.monitor.scrape import Samples, Scrape
from decodescope.monitor.series import ALL_SERIES, PREFIX
from decodescope.monitor.servers import Names

Figure = float | None  # None: nothing happened that it could be told from


class NotExported(Exception):
    """The server has no series for a figure."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at a server, by names with units. None: it exports nothing of the kind (then the name stands in
    `unavailable`), or nothing happened between the looks."""

    tokens_per_s: Figure = None
    prompt_tokens_per_s: Figure = None
    requests_running: Figure = None
    requests_waiting: Figure = None
    ttft_p50_s: Figure = None
    ttft_p95_s: Figure = None
    inter_token_p50_s: Figure = None
    inter_token_p95_s: Figure = None
    kv_cache_usage_ratio: Figure = None
    prefix_hit_ratio: Figure = None
    entropy_nats_mean: Figure = None
    repetition_ratio_mean: Figure = None
    answers_begun: Figure = None
    loops: Figure = None
    nonfinite_logits: Figure = None
    resident_bytes: Figure = None
    memory_usage_ratio: Figure = None
    device_memory_usage_ratio: Figure = None
    device_celsius: Figure = None
    unavailable: tuple[str, ...] = ()


class Between:
    """Two looks at one server; `old` is None where there was only one."""

    def __init__(self, new: Scrape, old: Scrape | None) -> None:
        self.new, self.old, self.server = new, old, new.server
        self.seconds = new.at - old.at if old else 0.0

    def gauge(self, names: Names, join: Callable[[Iterable[float]], float] = sum) -> Figure:
        """A value as it is now; those of several engines or devices joined."""
        values = [value for _, value in self.new.samples[self._name(names)] if math.isfinite(value)]
        return join(values) if values else None

    def grown(self, names: Names) -> Figure:
        """By how much a counter has grown."""
        name = self._name(names)
        return None if self.old is None else _grown(_total(self.new.samples, name), _total(self.old.samples, name))

    def grown_together(self, parts: Iterable[Names]) -> Figure:
        """By how much counters that add up have grown; those that are not exported count nothing."""
        known = [names for names in parts if any(name in self.new.samples for name in names)]
        if not known:
            raise NotExported
        grown = [self.grown(names) for names in known]
        return None if self.old is None else sum(each or 0 for each in grown)

    def rate(self, parts: Iterable[Names]) -> Figure:
        """Growth a second."""
        grown = self.grown_together(parts)
        return grown / self.seconds if grown is not None and self.seconds else None

    def mean(self, histogram: str) -> Figure:
        """The mean of what a histogram saw."""
        whole, count = self.grown((f"{histogram}_sum",)), self.grown((f"{histogram}_count",))
        return whole / count if whole is not None and count else None

    def quantile(self, histograms: Names, q: float) -> Figure:
        """An estimate of a quantile of what a histogram saw, from 0 to 1."""
        name = self._name(tuple(f"{each}_bucket" for each in histograms))
        if self.old is None:
            return None
        new, old = _buckets(self.new.samples, name), _buckets(self.old.samples, name)
        return bucket_quantile({le: _grown(count, old.get(le, 0)) for le, count in new.items()}, q)

    def per_device(self, part: str, whole: str) -> Figure:
        """The highest share among devices, of two gauges with the same labels."""
        parts, wholes = (self.new.samples[self._name((name,))] for name in (part, whole))
        by_labels = {tuple(sorted(labels.items())): value for labels, value in wholes}
        pairs = [(value, by_labels.get(tuple(sorted(labels.items())))) for labels, value in parts]
        return max((value / whole for value, whole in pairs if whole), default=None)

    def _name(self, names: Names) -> str:
        """The name by which this server exports a figure. Raises NotExported."""
        for name in names:
            if name in self.new.samples:
                return name
        raise NotExported


def bucket_quantile(buckets: Mapping[float, float], q: float) -> Figure:
    """The q-quantile of values of which `buckets[le]` are at most `le`; None where there are none.

    Beyond the highest finite bound it is that bound: all that is known is that the value is above.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0
    if total <= 0:
        return None
    below, count_below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= q * total and count > count_below:
            if math.isinf(bound):
                return below if len(bounds) > 1 else None
            start = min(below, bound)  # a first bucket that ends below 0 has no width that is known
            return start + (bound - start) * (q * total - count_below) / (count - count_below)
        below, count_below = bound, max(count, count_below)
    return None


def figures_of(step: Between, window: Between) -> Figures:
    """All figures: the rates over `step`, the last two looks; what few requests show over the longer `window`."""
    found: dict[str, Figure] = {}
    unavailable = []
    for name, ask in _ASKED.items():
        try:
            found[name] = ask(step if name in _AT_ONCE else window)
        except NotExported:
            unavailable.append(name)
    return Figures(**found, unavailable=tuple(unavailable))


def _kv_usage(looks: Between) -> Figure:
    if looks.server.kv_usage:
        return looks.gauge(looks.server.kv_usage, max)
    used, capacity = looks.gauge(looks.server.kv_used), looks.gauge(looks.server.kv_capacity)
    return used / capacity if used is not None and capacity else None


def _hit_ratio(looks: Between) -> Figure:
    server = looks.server
    try:
        found, whole = looks.grown(server.found), looks.grown_together(server.looked_up)
    except NotExported:
        return looks.gauge(server.hit_ratio, max)
    return found / whole if found is not None and whole else None


def _memory_usage(looks: Between) -> Figure:
    used, whole = looks.gauge(_OWN["process_resident_bytes"]), looks.gauge(_OWN["machine_memory_bytes"])
    return used / whole if used is not None and whole else None


_OWN = {each.name: (each.full_name,) for each in ALL_SERIES}
_AT_ONCE = ("tokens_per_s", "prompt_tokens_per_s")
_ASKED: dict[str, Callable[[Between], Figure]] = {
    "tokens_per_s": lambda looks: looks.rate([looks.server.generated]),
    "prompt_tokens_per_s": lambda looks: looks.rate(looks.server.prompt),
    "requests_running": lambda looks: looks.gauge(looks.server.running),
    "requests_waiting": lambda looks: looks.gauge(looks.server.waiting),
    "ttft_p50_s": lambda looks: looks.quantile(looks.server.first_token, 0.5),
    "ttft_p95_s": lambda looks: looks.quantile(looks.server.first_token, 0.95),
    "inter_token_p50_s": lambda looks: looks.quantile(looks.server.each_token, 0.5),
    "inter_token_p95_s": lambda looks: looks.quantile(looks.server.each_token, 0.95),
    "kv_cache_usage_ratio": _kv_usage,
    "prefix_hit_ratio": _hit_ratio,
    "entropy_nats_mean": lambda looks: looks.mean(PREFIX + "entropy_nats"),
    "repetition_ratio_mean": lambda looks: looks.mean(PREFIX + "repetition_ratio"),
    "answers_begun": lambda looks: looks.grown((PREFIX + "time_to_first_token_seconds_count",)),
    "loops": lambda looks: looks.grown(_OWN["loops_detected_total"]),
    "nonfinite_logits": lambda looks: looks.grown(_OWN["nonfinite_logits_total"]),
    "resident_bytes": lambda looks: looks.gauge(looks.server.resident),
    "memory_usage_ratio": _memory_usage,
    "device_memory_usage_ratio": lambda looks: looks.per_device(
        PREFIX + "device_memory_used_bytes", PREFIX + "device_memory_total_bytes"
    ),
    "device_celsius": lambda looks: looks.gauge(_OWN["device_temperature_celsius"], max),
}


def _grown(new: float, old: float) -> float:
    """A counter that has fallen was started anew."""
    return new - old if new >= old else new


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()) if math.isfinite(value))


def _buckets(samples: Samples, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound, of all label sets together."""
    found: dict[float, float] = defaultdict(float)
    for labels, value in samples.get(name, ()):
        with suppress(ValueError):
            found[float(labels.get("le", ""))] += value
    return dict(found)
