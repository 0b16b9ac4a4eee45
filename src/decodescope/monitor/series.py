"""Every series that decodescope exports: name without the prefix, kind, labels, buckets, meaning.

Suffixes are vLLM's. The bounds of latencies are those that OpenTelemetry's GenAI conventions advise for
`gen_ai.server.time_to_first_token`, `.time_per_output_token` and `.request.duration`. Every series also has the
label `model_name`; there is none for a prompt, a client or a run, whose number has no bound.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "decodescope_"
MODEL = "model_name"
Kind = Literal["counter", "histogram", "gauge"]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
EACH_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_NATS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0)
_PROBABILITY = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_LOGITS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0)
_MASS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_SHARE = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

FINISHED_REASONS = ("stop", "length", "abort", "error")
REFUSED_REASONS = ("queue_full", "too_long", "too_large", "invalid", "abandoned", "failed")


@dataclass(frozen=True, slots=True)
class Series:
    """One series; `labels` are those beside `model_name`, `buckets` the upper bounds of a histogram."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return PREFIX + self.name


def _counter(name: str, help: str, *labels: str) -> Series:
    return Series(name, "counter", help, labels)


def _histogram(name: str, buckets: tuple[float, ...], help: str) -> Series:
    return Series(name, "histogram", help, buckets=buckets)


def _gauge(name: str, help: str, *labels: str) -> Series:
    return Series(name, "gauge", help, labels)


COUNTERS = (
    _counter("prompt_tokens_total", "Tokens of the prompts that were taken in."),
    _counter("generation_tokens_total", "Tokens chosen."),
    _counter("request_success_total", "Requests that ended, by how.", "finished_reason"),
    _counter(
        "requests_refused_total", "Requests that never joined: turned away, or gone while they waited.", "reason"
    ),
    _counter("prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache, so not computed again."),
    _counter("loops_detected_total", "Requests whose text began to go round in circles, once each."),
    _counter("nonfinite_logits_total", "Requests that NaN or infinite logits ended."),
    _counter("guard_interventions_total", "What guards did.", "guard", "action"),
)
HISTOGRAMS = (
    _histogram("time_to_first_token_seconds", FIRST_TOKEN_S, "From the request to its first token."),
    _histogram("inter_token_latency_seconds", EACH_TOKEN_S, "From one token of a request to the next."),
    _histogram("e2e_request_latency_seconds", REQUEST_S, "From the request to its end, whatever ended it."),
    _histogram("request_queue_time_seconds", REQUEST_S, "From the request to the pass it joined."),
    _histogram("entropy_nats", _NATS, "Entropy of the raw distribution that a token was chosen from."),
    _histogram("chosen_probability", _PROBABILITY, "Raw probability of the chosen token."),
    _histogram("margin_logits", _LOGITS, "Distance between the two highest raw logits."),
    _histogram("kept_mass", _MASS, "Probability that all sampler stages of a step left, as a product."),
    _histogram("repetition_ratio", _SHARE, "Share of a finished answer's 4-grams that stood in it before."),
)
SERVING_GAUGES = (
    _gauge("requests_running", "Requests that are being decoded."),
    _gauge("requests_waiting", "Requests in the queue."),
    _gauge("kv_cache_used_bytes", "Keys and values of the tokens in the cache."),
    _gauge("kv_cache_reserved_bytes", "Keys and values promised to running requests: of their longest answers."),
    _gauge("kv_cache_capacity_bytes", "Keys and values that the cache may hold."),
)
PROCESS_GAUGES = (
    _gauge("process_resident_bytes", "Resident memory of this process."),
    _gauge("process_peak_resident_bytes", "The most resident memory this process ever had."),
    _gauge(
        "machine_memory_bytes",
        "Memory this process may have: by its own limits, its control groups', or the machine's.",
    ),
)
DEVICE_GAUGES = (
    _gauge("device_memory_used_bytes", "Device memory in use, by any process.", "device"),
    _gauge("device_memory_peak_bytes", "The most that tensors of this process ever took on a device.", "device"),
    _gauge("device_memory_total_bytes", "Device memory there is.", "device"),
    _gauge("device_temperature_celsius", "Temperature of a device.", "device"),
    _gauge("device_power_watts", "Power that a device draws.", "device"),
    _gauge("device_utilization_ratio", "Share of the last moment in which a device had work.", "device"),
)
BUILD_INFO = _gauge("build_info", "1; its labels say what runs.", "version", "torch")
GAUGES = (*SERVING_GAUGES, *PROCESS_GAUGES, *DEVICE_GAUGES, BUILD_INFO)
ALL_SERIES = (*COUNTERS, *HISTOGRAMS, *GAUGES)
