"""Recording rules: what each engine exports comes out as the same series, and what it does not export does not."""

import re

import pytest
from prometheus_server import needs_promtool
from promtool_cases import check_values, grows, labelled, recorded, stays

from decodescope.monitor.rules import ENGINES, Pace, recording_groups
from decodescope.monitor.series import ALL_SERIES, PREFIX

RULES = recording_groups(Pace())[0]["rules"]
# Exported by each engine; every counter grows by 10 a second, every observed time is evenly spread over 0 to 1 s.
GAUGES = {
    "decodescope": {
        "requests_running": 3,
        "requests_waiting": 7,
        "kv_cache_reserved_bytes": 40,
        "kv_cache_capacity_bytes": 100,
    },
    "vllm": {"num_requests_running": 3, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.4},
    "sglang": {"num_running_reqs": 3, "num_queue_reqs": 7, "token_usage": 0.4},
    "llamacpp": {"requests_processing": 3, "requests_deferred": 7},
}
COUNTERS = {
    "decodescope": [
        "generation_tokens_total",
        "prompt_tokens_total",
        "prefix_cache_hit_tokens_total",
        "prefix_cache_query_tokens_total",
    ],
    "vllm": [
        "generation_tokens_total",
        "prompt_tokens_total",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
    ],
    "sglang": ["generation_tokens_total", "prompt_tokens_total", "cached_tokens_total", "num_requests_total"],
    "llamacpp": ["tokens_predicted_total", "prompt_tokens_total", "prompt_tokens_cached_total"],
}
TIMES = {
    "decodescope": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ],
    "vllm": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ],
    "sglang": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "queue_time_seconds",
    ],
    "llamacpp": [],
}
ENDED = {"decodescope": "request_success_total", "vllm": "request_success_total"}  # by finished_reason
# series: value, for the engines that export what it is made of
EVERY = {
    "llm:tokens_per_second": 10,
    "llm:prompt_tokens_per_second": 10,
    "llm:requests_running": 3,
    "llm:requests_waiting": 7,
    "llm:prefix_cache_hit_ratio": 1,
    "llm:requests_running:mean": 3,
    "llm:tokens_per_second:busy": 10,
    "llm:tokens_per_second_per_request:busy": 3.333333,
}
ALL_BUT_LLAMACPP = {
    "llm:requests_per_second": 10,
    "llm:kv_cache_usage_ratio": 0.4,
    **{f"llm:{name}_seconds:p50": 0.5 for name in ("ttft", "inter_token", "e2e", "queue")},
    **{f"llm:{name}_seconds:p95": 0.95 for name in ("ttft", "inter_token", "e2e", "queue")},
}
OURS = {
    "llm:entropy_nats:mean": 0.5,
    "llm:chosen_probability:mean": 0.5,
    "llm:margin_logits:mean": 0.5,
    "llm:kept_mass:mean": 0.5,
    "llm:repetition_ratio:mean": 0.5,
    "llm:process_memory_usage_ratio": 0.25,
}
LLAMACPP_DIFFERS = {
    "llm:prompt_tokens_per_second": 20,
    "llm:prefix_cache_hit_ratio": 0.5,
}  # cached ones counted apart


def exported(engine: str) -> dict[str, str]:
    prefix = PREFIX if engine == "decodescope" else f"{engine}:"
    series = {labelled(prefix + name, engine): stays(value) for name, value in GAUGES[engine].items()}
    series |= {labelled(prefix + name, engine): grows(150) for name in COUNTERS[engine]}
    for name in TIMES[engine]:
        series |= {labelled(f"{prefix}{name}_bucket", engine, le=le): grows(150) for le in ("1.0", "2.5", "+Inf")}
    if engine in ENDED:
        series |= {
            labelled(prefix + ENDED[engine], engine, finished_reason=why): grows(75) for why in ("stop", "length")
        }
    if engine == "decodescope":
        series |= {
            labelled(f"{PREFIX}{name}_sum"): grows(75)
            for name in ("entropy_nats", "chosen_probability", "margin_logits", "kept_mass", "repetition_ratio")
        }
        series |= {
            labelled(f"{PREFIX}{name}_count"): grows(150)
            for name in ("entropy_nats", "chosen_probability", "margin_logits", "kept_mass", "repetition_ratio")
        }
        series |= {
            labelled(f"{PREFIX}process_resident_bytes"): stays(1000),
            labelled(f"{PREFIX}machine_memory_bytes"): stays(4000),
        }
    return series


def expected(engine: str) -> dict[str, float]:
    values = dict(EVERY) if engine == "llamacpp" else EVERY | ALL_BUT_LLAMACPP
    return values | (OURS if engine == "decodescope" else {}) | (LLAMACPP_DIFFERS if engine == "llamacpp" else {})


@needs_promtool
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_exports_becomes_the_common_series_and_nothing_else_does(tmp_path, engine):
    labels = recorded(engine)
    every = EVERY | ALL_BUT_LLAMACPP | OURS
    values = {name: [(labels, value)] for name, value in expected(engine).items()}
    check_values(tmp_path, exported(engine), 10, {name: values.get(name, []) for name in every})


@needs_promtool
def test_engines_with_several_parts_are_joined(tmp_path):
    series = {
        labelled("vllm:num_requests_running", "vllm", engine="0"): stays(3),
        labelled("vllm:num_requests_running", "vllm", engine="1"): stays(4),
        labelled("vllm:kv_cache_usage_perc", "vllm", engine="0"): stays(0.2),
        labelled("vllm:kv_cache_usage_perc", "vllm", engine="1"): stays(0.9),
        labelled("vllm:generation_tokens_total", "vllm", engine="0"): grows(15),
        labelled("vllm:generation_tokens_total", "vllm", engine="1"): grows(30),
        labelled("sglang:prompt_tokens_total", "sglang"): grows(150),
        labelled("sglang:cached_tokens_total", "sglang", cache_source="device"): grows(30),
        labelled("sglang:cached_tokens_total", "sglang", cache_source="host"): grows(60),
    }
    vllm, sglang = recorded("vllm"), recorded("sglang")
    check_values(
        tmp_path,
        series,
        10,
        {
            "llm:requests_running": [(vllm, 7)],
            "llm:kv_cache_usage_ratio": [(vllm, 0.9)],
            "llm:tokens_per_second": [(vllm, 3)],
            "llm:prefix_cache_hit_ratio": [(sglang, 0.6)],
        },
    )


@needs_promtool
def test_a_server_without_requests_has_no_means_and_no_speed_of_a_busy_one(tmp_path):
    names = ("entropy_nats", "kept_mass", "repetition_ratio")
    series = {labelled(f"{PREFIX}{name}_{part}"): stays(5) for name in names for part in ("sum", "count")}
    series |= {
        labelled(f"{PREFIX}requests_running"): stays(0),
        labelled(f"{PREFIX}generation_tokens_total"): stays(9),
    }
    silent = {f"llm:{name}:mean": [] for name in names}
    silent |= {"llm:tokens_per_second:busy": [], "llm:tokens_per_second_per_request:busy": []}
    check_values(tmp_path, series, 10, silent | {"llm:tokens_per_second": [(recorded(), 0)]})


@needs_promtool
def test_the_usual_speed_is_the_median_of_the_hour_before_the_last_ten_minutes(tmp_path):
    speeds = "0+300x280 84075+75x120"  # 20 tokens/s for 70 minutes, then 5
    series = {
        labelled(f"{PREFIX}generation_tokens_total"): speeds,
        labelled(f"{PREFIX}requests_running"): stays(2, 400),
    }
    check_values(
        tmp_path,
        series,
        80,
        {"llm:tokens_per_second:usual": [(recorded(), 20)], "llm:tokens_per_second": [(recorded(), 5)]},
    )
    check_values(tmp_path, series, 9, {"llm:tokens_per_second:usual": []})


def test_rules_read_only_what_is_exported_or_recorded():
    known = {series.full_name for series in ALL_SERIES}
    known |= {
        f"{s.full_name}_{part}" for s in ALL_SERIES if s.kind == "histogram" for part in ("bucket", "sum", "count")
    }
    known |= {rule["record"] for rule in RULES}
    read = {name for rule in RULES for name in re.findall(rf"\b(?:{PREFIX}|llm:)[\w:]+", rule["expr"])}
    assert len(read) > 25
    assert read - known == set()


def test_a_series_is_recorded_before_it_is_read():
    before: set[str] = set()
    for rule in RULES:
        assert set(re.findall(r"\bllm:[\w:]+", rule["expr"])) <= before, rule
        before.add(rule["record"])


@pytest.mark.parametrize(
    ("scale", "seconds", "text"),
    [
        (1, 15, "15s"),
        (1, 120, "2m"),
        (1, 3600, "1h"),
        (1, 90, "90s"),
        (1 / 60, 15, "250ms"),
        (1 / 60, 120, "2s"),
        (1e-9, 1, "1ms"),
    ],
)
def test_times_are_written_as_prometheus_reads_them(scale, seconds, text):
    assert Pace(scale).span(seconds) == text
