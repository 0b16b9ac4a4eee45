"""Recording rules: what four engines export, mapped onto the same series, so that one dashboard watches them all.

An engine that does not export a figure has no series for it. The names were read in vLLM
(vllm/v1/metrics/loggers.py), SGLang (python/sglang/srt/metrics/collector.py) and llama.cpp (tools/server/
server-task.cpp). llama-server tells no times and no cache use, and counts cached prompt tokens apart, where the
others count them in; SGLang counts a request when it has ended.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from decodescope.monitor.series import PREFIX

ENGINES = ("decodescope", "vllm", "sglang", "llamacpp")  # the jobs of a scrape configuration, too
QUANTILES = {"p50": 0.5, "p95": 0.95}
BUSY_REQUESTS = 0.1  # on average in a window: below it a server counts as idle
Rule = dict[str, object]
_BY = "job, instance, model_name"

# series: {engine: counters whose rates are added}
_RATES: dict[str, dict[str, tuple[str, ...]]] = {
    "llm:tokens_per_second": {
        "decodescope": (f"{PREFIX}generation_tokens_total",),
        "vllm": ("vllm:generation_tokens_total",),
        "sglang": ("sglang:generation_tokens_total",),
        "llamacpp": ("llamacpp:tokens_predicted_total",),
    },
    "llm:prompt_tokens_per_second": {
        "decodescope": (f"{PREFIX}prompt_tokens_total",),
        "vllm": ("vllm:prompt_tokens_total",),
        "sglang": ("sglang:prompt_tokens_total",),
        "llamacpp": ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    },
    "llm:requests_per_second": {
        "decodescope": (f"{PREFIX}request_success_total",),
        "vllm": ("vllm:request_success_total",),
        "sglang": ("sglang:num_requests_total",),
    },
}
# series: {engine: histogram}
_TIMES = {
    "llm:ttft_seconds": {
        "decodescope": f"{PREFIX}time_to_first_token_seconds",
        "vllm": "vllm:time_to_first_token_seconds",
        "sglang": "sglang:time_to_first_token_seconds",
    },
    "llm:inter_token_seconds": {
        "decodescope": f"{PREFIX}inter_token_latency_seconds",
        "vllm": "vllm:inter_token_latency_seconds",
        "sglang": "sglang:inter_token_latency_seconds",
    },
    "llm:e2e_seconds": {
        "decodescope": f"{PREFIX}e2e_request_latency_seconds",
        "vllm": "vllm:e2e_request_latency_seconds",
        "sglang": "sglang:e2e_request_latency_seconds",
    },
    "llm:queue_seconds": {
        "decodescope": f"{PREFIX}request_queue_time_seconds",
        "vllm": "vllm:request_queue_time_seconds",
        "sglang": "sglang:queue_time_seconds",
    },
}
# series: {engine: (how the parts of one server are joined, gauge)}
_GAUGES = {
    "llm:requests_running": {
        "decodescope": ("sum", f"{PREFIX}requests_running"),
        "vllm": ("sum", "vllm:num_requests_running"),
        "sglang": ("sum", "sglang:num_running_reqs"),
        "llamacpp": ("sum", "llamacpp:requests_processing"),
    },
    "llm:requests_waiting": {
        "decodescope": ("sum", f"{PREFIX}requests_waiting"),
        "vllm": ("sum", "vllm:num_requests_waiting"),
        "sglang": ("sum", "sglang:num_queue_reqs"),
        "llamacpp": ("sum", "llamacpp:requests_deferred"),
    },
    "llm:kv_cache_usage_ratio": {
        "decodescope": ("max", f"{PREFIX}kv_cache_reserved_bytes / {PREFIX}kv_cache_capacity_bytes"),
        "vllm": ("max", "vllm:kv_cache_usage_perc"),
        "sglang": ("max", "sglang:token_usage"),
    },
}
# engine: (counter of prompt tokens found in the cache, counters that add up to all prompt tokens)
_PREFIX_HITS = {
    "decodescope": (f"{PREFIX}prefix_cache_hit_tokens_total", (f"{PREFIX}prefix_cache_query_tokens_total",)),
    "vllm": ("vllm:prefix_cache_hits_total", ("vllm:prefix_cache_queries_total",)),
    "sglang": ("sglang:cached_tokens_total", ("sglang:prompt_tokens_total",)),
    "llamacpp": (
        "llamacpp:prompt_tokens_cached_total",
        ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    ),
}
# What only decodescope measures, as means over tokens or answers.
_MEANS = ("entropy_nats", "chosen_probability", "margin_logits", "kept_mass", "repetition_ratio")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast rules look: `scale` 1 fits a scrape every 15 seconds, a smaller one shortens all times alike."""

    scale: float = 1.0

    def span(self, seconds: float) -> str:
        """A time as Prometheus writes it, to the millisecond."""
        milliseconds = max(1, round(seconds * self.scale * 1000))
        for unit, length in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
            if milliseconds % length == 0:
                return f"{milliseconds // length}{unit}"
        return f"{milliseconds}ms"

    @property
    def scrape(self) -> str:
        """Between two looks at a server, and two evaluations of the rules."""
        return self.span(15)

    @property
    def window(self) -> str:
        """What rates, quantiles and means are taken over."""
        return self.span(120)


def recording_groups(pace: Pace) -> list[Rule]:
    """The rules in the shape of a rule file's `groups`; later ones read what earlier ones record."""
    rules = [*_mapped(pace.window), *_own(pace), *_usual(pace)]
    return [{"name": "llm", "interval": pace.scrape, "rules": rules}]


def _mapped(window: str) -> Iterator[Rule]:
    for record, engines in _RATES.items():
        for engine, counters in engines.items():
            yield _rule(record, _rate(counters, window), engine)
    for record, histograms in _TIMES.items():
        for engine, histogram in histograms.items():
            yield from _quantiles(record, histogram, engine, window)
    for record, gauges in _GAUGES.items():
        for engine, (joined, gauge) in gauges.items():
            yield _rule(record, f"{joined} by ({_BY}) ({gauge})", engine)
    for engine, (hits, whole) in _PREFIX_HITS.items():
        yield _rule("llm:prefix_cache_hit_ratio", _share((hits,), whole, window), engine)


def _own(pace: Pace) -> Iterator[Rule]:
    window, long = pace.window, pace.span(600)
    for name in _MEANS:
        mean = _share((f"{PREFIX}{name}_sum",), (f"{PREFIX}{name}_count",), window)
        yield _rule(f"llm:{name}:mean", mean, "decodescope")
    for record, counter in (
        ("llm:nonfinite_logits:increase", "nonfinite_logits_total"),
        ("llm:loops:increase", "loops_detected_total"),
        ("llm:answers_begun:increase", "time_to_first_token_seconds_count"),
    ):
        yield _rule(record, f"sum by ({_BY}) (increase({PREFIX}{counter}[{long}]))", "decodescope")
    memory = f"{PREFIX}process_resident_bytes / {PREFIX}machine_memory_bytes"
    yield _rule("llm:process_memory_usage_ratio", f"max by ({_BY}) ({memory})", "decodescope")
    device = f"{PREFIX}device_memory_used_bytes / {PREFIX}device_memory_total_bytes"
    yield _rule("llm:device_memory_usage_ratio", f"max by ({_BY}, device) ({device})", "decodescope")
    celsius = f"max by ({_BY}, device) ({PREFIX}device_temperature_celsius)"
    yield _rule("llm:device_temperature_celsius", celsius, "decodescope")


def _usual(pace: Pace) -> Iterator[Rule]:
    """What a busy server does now, and what it did in the hour before: the median, so that a fault weighs little.

    Fewer clients lower the sum and more clients lower each one's part; only a slower server lowers both.
    """
    yield _rule("llm:requests_running:mean", f"avg_over_time(llm:requests_running[{pace.window}])")
    busy = f"(llm:requests_running:mean > {BUSY_REQUESTS})"
    yield _rule("llm:tokens_per_second:busy", f"llm:tokens_per_second and {busy}")
    yield _rule("llm:tokens_per_second_per_request:busy", f"llm:tokens_per_second / {busy}")
    for name in ("tokens_per_second", "tokens_per_second_per_request"):
        hour = f"llm:{name}:busy[{pace.span(3600)}] offset {pace.span(600)}"
        yield _rule(f"llm:{name}:usual", f"quantile_over_time(0.5, {hour})")


def _quantiles(record: str, histogram: str, engine: str, window: str) -> Iterator[Rule]:
    """Of nothing a quantile is NaN, which no comparison lets through."""
    for name, quantile in QUANTILES.items():
        buckets = f"sum by ({_BY}, le) (rate({histogram}_bucket[{window}]))"
        yield _rule(f"{record}:{name}", f"histogram_quantile({quantile}, {buckets}) >= 0", engine)


def _rate(counters: tuple[str, ...], window: str) -> str:
    return " + ".join(f"sum by ({_BY}) (rate({counter}[{window}]))" for counter in counters)


def _share(part: tuple[str, ...], whole: tuple[str, ...], window: str) -> str:
    """Nothing divided by nothing is NaN to Prometheus: then there is no value."""
    below = _rate(whole, window)
    return f"{_rate(part, window)} / (({below}) > 0)"


def _rule(record: str, expr: str, engine: str | None = None) -> Rule:
    labels: Mapping[str, object] = {"labels": {"engine": engine}} if engine else {}
    return {"record": record, "expr": expr, **labels}
