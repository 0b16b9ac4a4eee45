"""Figures from counters: right where they are known, "unavailable" where a server tells nothing."""

import math
import re
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from exposed import llama_server, sglang, step, vllm
from hypothesis import given
from hypothesis import strategies as st

from decodescope.monitor.metrics import Metrics
from decodescope.monitor.readings import Between, Figures, bucket_quantile, figures_of
from decodescope.monitor.rules import Pace, recording_groups
from decodescope.monitor.scrape import Scrape, read
from decodescope.monitor.series import EACH_TOKEN_S, PREFIX
from decodescope.monitor.servers import SERVERS
from decodescope.trace.records import Trace

ALL = {each.name for each in fields(Figures)} - {"unavailable"}


def look(text: str, at: float) -> Scrape:
    return read(text, at, "there")


def figures(old: str, new: str, seconds: float = 2.0) -> Figures:
    looks = Between(look(new, 10 + seconds), look(old, 10.0))
    return figures_of(looks, looks)


def test_vllm_is_read():
    found = figures(vllm(100, 10, 40), vllm(160, 14, 70))
    assert found.tokens_per_s == 30
    assert found.prompt_tokens_per_s == 20
    assert (found.requests_running, found.requests_waiting) == (3, 2)
    assert found.kv_cache_usage_ratio == 0.97
    assert found.prefix_hit_ratio == 0.75
    assert found.ttft_p50_s == 0.25
    assert found.ttft_p95_s == pytest.approx(0.475)
    assert found.inter_token_p50_s == pytest.approx(0.0175)
    assert found.resident_bytes == 1.5e9
    assert {"entropy_nats_mean", "loops", "nonfinite_logits", "device_celsius"} <= set(found.unavailable)


def test_the_older_names_of_vllm_are_known():
    older = {
        "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
        "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache": "vllm:gpu_prefix_cache",
    }

    def aged(text: str) -> str:
        for new, old in older.items():
            text = text.replace(new, old)
        return text

    assert figures(aged(vllm(100)), aged(vllm(160))) == figures(vllm(100), vllm(160))


def test_engines_of_one_server_are_added_and_the_fullest_cache_counts():
    def two(tokens: int) -> str:
        other = vllm(tokens).replace('engine="0"', 'engine="1"').replace("0.97", "0.12")
        return vllm(tokens) + other.replace("process_resident", "other_resident")

    found = figures(two(100), two(160))
    assert (found.tokens_per_s, found.requests_running, found.kv_cache_usage_ratio) == (60, 6, 0.97)
    assert found.inter_token_p50_s == pytest.approx(0.0175)


def test_sglang_is_read():
    found = figures(sglang(100, 200, 50), sglang(180, 300, 75))
    assert (found.tokens_per_s, found.prompt_tokens_per_s) == (40, 50)
    assert (found.requests_running, found.requests_waiting) == (4, 1)
    assert found.kv_cache_usage_ratio == 0.28
    assert found.prefix_hit_ratio == 0.25
    assert {"ttft_p50_s", "inter_token_p95_s", "resident_bytes"} <= set(found.unavailable)


def test_sglang_without_a_count_of_cached_tokens_is_taken_at_its_word():
    def without(text: str) -> str:
        return "".join(line for line in text.splitlines(True) if "cached_tokens" not in line)

    assert figures(without(sglang(100)), without(sglang(180))).prefix_hit_ratio == 0.01


def test_llama_server_is_read():
    found = figures(llama_server(100, 150, 50), llama_server(140, 180, 60))
    assert found.tokens_per_s == 20
    assert found.prompt_tokens_per_s == 20, "those that were cached are prompt tokens too"
    assert found.prefix_hit_ratio == 0.25
    assert (found.requests_running, found.requests_waiting) == (1, 0)
    assert set(found.unavailable) == ALL - {
        "tokens_per_s", "prompt_tokens_per_s", "prefix_hit_ratio", "requests_running", "requests_waiting",
    }  # fmt: skip


def test_what_is_unavailable_has_no_value_and_what_has_a_value_is_available():
    for old, new in ((vllm(1), vllm(9)), (sglang(1), sglang(9)), (llama_server(1), llama_server(9))):
        found = figures(old, new)
        assert all(getattr(found, name) is None for name in found.unavailable)


def ours(metrics: Metrics, tokens: int) -> str:
    metrics.joined("a", 10, 4, 0.1)
    for at in range(tokens):
        metrics.stepped("a", step(at, entropy_nats=at / 10), 0.2 if at == 0 else 0.04)
    metrics.ended("a", Trace(None, [step(at, token_id=at % 2) for at in range(tokens)]), 1.0, "stop")
    return metrics.exposition()[0].decode()


def test_our_own_are_read():
    metrics = Metrics(
        "m", lambda: {"kv_cache_used_bytes": 30, "kv_cache_capacity_bytes": 40, "requests_running": 1}
    )
    old = ours(metrics, 5)
    found = figures(old, ours(metrics, 41))
    assert found.tokens_per_s == 20.5
    assert found.prefix_hit_ratio == 0.4
    assert found.kv_cache_usage_ratio == 0.75
    assert found.entropy_nats_mean == pytest.approx(2.0)
    assert found.repetition_ratio_mean == pytest.approx(1 - 2 / 38)
    assert (found.answers_begun, found.loops, found.nonfinite_logits) == (1, 1, 0)
    assert 0.1 < found.ttft_p50_s <= 0.25
    assert 0.025 < found.inter_token_p95_s <= 0.05
    assert 0 < found.memory_usage_ratio < 1
    assert "requests_waiting" in found.unavailable and found.requests_waiting is None
    assert found.device_celsius is None and "device_celsius" in found.unavailable


def test_the_fullest_device_counts():
    def devices(used: int) -> str:
        return "".join(
            f'{PREFIX}device_memory_{part}_bytes{{device="cuda:{index}",model_name="m"}} {value}\n'
            for index, (part_used, total) in enumerate([(used, 100), (30, 40)])
            for part, value in (("used", part_used), ("total", total))
        )

    assert figures(devices(10), devices(20)).device_memory_usage_ratio == 0.75
    assert figures(devices(10), devices(90)).device_memory_usage_ratio == 0.9
    assert figures(devices(10), devices(90).replace(" 40", " 0")).device_memory_usage_ratio == 0.9


def test_after_a_single_look_only_what_is_momentary_is_known():
    looks = Between(look(vllm(), 1.0), None)
    found = figures_of(looks, looks)
    assert found.requests_running == 3 and found.kv_cache_usage_ratio == 0.97
    assert found.tokens_per_s is None and found.ttft_p50_s is None and found.prefix_hit_ratio is None
    assert "tokens_per_s" not in found.unavailable


def test_where_nothing_happened_rates_are_zero_and_means_are_none():
    found = figures(vllm(100), vllm(100))
    assert (found.tokens_per_s, found.ttft_p50_s, found.prefix_hit_ratio) == (0, None, None)


def test_a_counter_that_fell_was_started_anew():
    assert figures(vllm(100, 10), vllm(60, 4)).tokens_per_s == 30


def test_values_that_are_no_numbers_are_no_figures():
    broken = re.sub(r"(num_requests_running\{[^}]*\}) .*", r"\1 NaN", vllm(160))
    assert figures(vllm(100), broken).requests_running is None


@given(
    st.lists(st.floats(0.0001, 30), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.lists(st.floats(0.001, 20), min_size=1, max_size=8, unique=True),
)
def test_an_estimated_quantile_lies_in_the_bucket_of_the_true_one(values, q, bounds):
    edges = [*sorted(bounds), math.inf]
    buckets = {edge: float(sum(value <= edge for value in values)) for edge in edges}
    true = float(np.quantile(values, q, method="inverted_cdf"))
    estimate = bucket_quantile(buckets, q)
    high = next(edge for edge in edges if true <= edge)
    low = max((edge for edge in edges if edge < true), default=0.0)
    if math.isinf(high):
        assert estimate == edges[-2]
    else:
        assert low <= estimate <= high + 1e-12


@pytest.mark.parametrize("buckets", [{}, {math.inf: 0.0}, {0.1: 0.0, math.inf: 0.0}, {math.inf: 5.0}])
def test_a_quantile_of_nothing_known_is_none(buckets):
    assert bucket_quantile(buckets, 0.5) is None


def test_a_first_bucket_that_ends_below_zero_is_its_own_bound():
    assert bucket_quantile({-1.0: 10.0, 1.0: 10.0, math.inf: 10.0}, 0.5) == -1.0


def test_estimates_of_our_latencies_are_as_exact_as_the_buckets():
    metrics, seconds = Metrics("m", measure=list), [0.011 + at * 0.0005 for at in range(200)]
    old = metrics.exposition()[0].decode()
    for at, each in enumerate(seconds):
        metrics.stepped("a", step(at + 1), each)
    found = figures(old, metrics.exposition()[0].decode())
    for estimate, q in ((found.inter_token_p50_s, 0.5), (found.inter_token_p95_s, 0.95)):
        true = float(np.quantile(seconds, q))
        width = next(high - low for low, high in pairwise(EACH_TOKEN_S) if true <= high)
        assert abs(estimate - true) <= width


def test_the_rules_for_prometheus_read_no_other_series_of_these_servers():
    known = {name for server in SERVERS for name in server.all_names}
    read_by_rules = set(re.findall(r"(?:vllm|sglang|llamacpp):[a-z0-9_]+", str(recording_groups(Pace()))))
    latencies = {
        name for name in read_by_rules if re.search(r"e2e|queue|num_requests_total|request_success", name)
    }
    assert read_by_rules - latencies <= known
