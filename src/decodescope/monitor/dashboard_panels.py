"""The panels of the dashboard: what each asks, in which unit. Their titles are the sentences `panel.{key}.*`."""

from dataclasses import dataclass
from typing import Literal

from decodescope.monitor.rules import ENGINES
from decodescope.monitor.series import PREFIX

Kind = Literal["stat", "timeseries", "heatmap"]
TARGET = 'job=~"$job",instance=~"$instance"'
CHOSEN = TARGET + ',model_name=~"$model_name"'
RATE = "$__rate_interval"

TOKENS_PER_SECOND, NATS = "suffix: tok/s", "suffix: nats"  # custom units; the others are Grafana's
COUNT, PER_SECOND, SECONDS, SHARE, BYTES, PLAIN = "short", "reqps", "s", "percentunit", "bytes", "none"
CELSIUS, WATTS = "celsius", "watt"
JOBS = "|".join(ENGINES)


@dataclass(frozen=True, slots=True)
class Query:
    """One query; its legend is `word`, if any (a quantile, or `panel.word.{word}`), and the labels `by`.

    `exemplar` asks for exemplars, which only a histogram's own buckets have.
    """

    expr: str
    word: str = ""
    by: tuple[str, ...] = ("instance",)
    exemplar: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, `width` of 24 columns wide."""

    key: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    needs_device: bool = False


def _q(series: str, word: str = "", *by: str) -> Query:
    return Query(f"{series}{{{CHOSEN}}}", word, by or ("instance",))


def _ours(name: str, word: str = "", *by: str) -> Query:
    return _q(PREFIX + name, word, *by)


def _quantiles(record: str, histogram: str) -> tuple[Query, ...]:
    """The recorded ones of every engine; and the 99th of ours, whose buckets carry exemplars."""
    buckets = f"sum by (instance, le) (rate({PREFIX}{histogram}_bucket{{{CHOSEN}}}[{RATE}]))"
    worst = Query(f"histogram_quantile(0.99, {buckets}) >= 0", "p99", exemplar=True)
    return _q(f"{record}:p50", "p50"), _q(f"{record}:p95", "p95"), worst


def _heat(histogram: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (increase({PREFIX}{histogram}_bucket{{{CHOSEN}}}[{RATE}]))"
    return (Query(rate, by=("le",), exemplar=True),)


def _mean(key: str, unit: str, width: int = 8) -> Panel:
    return Panel(key, unit, (_q(f"llm:{key}:mean"),), width=width)


def _happened(counter: str, *by: str) -> tuple[Query, ...]:
    grouped = ", ".join(by)
    return (Query(f"sum by ({grouped}) (increase({PREFIX}{counter}{{{CHOSEN}}}[{RATE}]))", by=by),)


def _now(key: str, unit: str, expr: str) -> Panel:
    return Panel(key, unit, (Query(expr, by=()),), "stat", 4)


def _sum(series: str) -> str:
    return f"sum({series}{{{CHOSEN}}})"


_ALERTS = f'ALERTS{{alertstate="firing",{TARGET}}}'

ROWS: dict[str, tuple[Panel, ...]] = {
    "now": (
        _now("targets_up", COUNT, f"sum(up{{{TARGET}}})"),
        _now("alerts_firing", COUNT, f"count({_ALERTS}) or vector(0)"),
        _now("speed_now", TOKENS_PER_SECOND, _sum("llm:tokens_per_second")),
        _now("running_now", COUNT, _sum("llm:requests_running")),
        _now("waiting_now", COUNT, _sum("llm:requests_waiting")),
        _now("cache_now", SHARE, f"max(llm:kv_cache_usage_ratio{{{CHOSEN}}})"),
        Panel("targets", COUNT, (Query(f"up{{{TARGET}}}", by=("job", "instance")),), width=12),
        Panel("alerts", COUNT, (Query(f"count by (alertname) ({_ALERTS})", by=("alertname",)),), width=12),
    ),
    "speed": (
        Panel(
            "throughput", TOKENS_PER_SECOND,
            (_q("llm:tokens_per_second", "new"), _q("llm:prompt_tokens_per_second", "prompt")),
        ),
        Panel(
            "throughput_usual", TOKENS_PER_SECOND,
            (_q("llm:tokens_per_second:busy", "now"), _q("llm:tokens_per_second:usual", "usual")),
        ),
        Panel("requests", PER_SECOND, (_q("llm:requests_per_second"),)),
        Panel("ttft", SECONDS, _quantiles("llm:ttft_seconds", "time_to_first_token_seconds")),
        Panel("inter_token", SECONDS, _quantiles("llm:inter_token_seconds", "inter_token_latency_seconds")),
        Panel("e2e", SECONDS, _quantiles("llm:e2e_seconds", "e2e_request_latency_seconds")),
        Panel("queue_time", SECONDS, _quantiles("llm:queue_seconds", "request_queue_time_seconds")),
        Panel("queue", COUNT, (_q("llm:requests_running", "running"), _q("llm:requests_waiting", "waiting"))),
        Panel("ended", COUNT, _happened("request_success_total", "finished_reason"), width=4),
        Panel("refused", COUNT, _happened("requests_refused_total", "reason"), width=4),
    ),
    "decoding": (
        Panel("entropy", NATS, _heat("entropy_nats"), "heatmap", 16),
        _mean("entropy_nats", NATS),
        _mean("chosen_probability", SHARE),
        _mean("margin_logits", PLAIN),
        _mean("kept_mass", SHARE),
        _mean("repetition_ratio", SHARE),
        Panel("loops", COUNT, _happened("loops_detected_total", "instance"), width=4),
        Panel("nonfinite", COUNT, _happened("nonfinite_logits_total", "instance"), width=4),
        Panel("guards", COUNT, _happened("guard_interventions_total", "guard", "action")),
    ),
    "memory": (
        Panel("kv_cache", SHARE, (_q("llm:kv_cache_usage_ratio"),)),
        Panel(
            "kv_bytes", BYTES,
            (
                _ours("kv_cache_used_bytes", "used"),
                _ours("kv_cache_reserved_bytes", "reserved"),
                _ours("kv_cache_capacity_bytes", "capacity"),
            ),
        ),
        Panel("prefix_cache", SHARE, (_q("llm:prefix_cache_hit_ratio"),)),
        Panel(
            "process_memory", BYTES,
            (_ours("process_resident_bytes", "used"), _ours("process_peak_resident_bytes", "peak"),
             _ours("machine_memory_bytes", "capacity")),
        ),
        Panel(
            "device_memory", BYTES,
            (_ours("device_memory_used_bytes", "used", "instance", "device"),
             _ours("device_memory_peak_bytes", "peak", "instance", "device"),
             _ours("device_memory_total_bytes", "capacity", "instance", "device")),
            needs_device=True,
        ),
        Panel(
            "device_load", SHARE, (_ours("device_utilization_ratio", "", "instance", "device"),),
            needs_device=True,
        ),
        Panel(
            "device_temperature", CELSIUS, (_ours("device_temperature_celsius", "", "instance", "device"),),
            needs_device=True,
        ),
        Panel("device_power", WATTS, (_ours("device_power_watts", "", "instance", "device"),), needs_device=True),
    ),
}  # fmt: skip
