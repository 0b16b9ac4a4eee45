"""What `Metrics` counts, and how it is fetched."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from exposed import STOPPED, step
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as families

from decodescope import Session
from decodescope.monitor import series as s
from decodescope.monitor.metrics import Metrics
from decodescope.serving.watcher import Watcher
from decodescope.trace.records import Trace
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    session = Session.open(str(make_tiny_model(tmp_path_factory.mktemp("model"))))
    return session.run("Hi", temperature=1.5, top_k=40, top_p=0.8, seed=3, max_new_tokens=24, ignore_eos=True)


def told(trace: Trace, metrics: Metrics, run_id: str = "r1", reason: str = "length") -> Metrics:
    metrics.joined(run_id, len(trace.run.prompt_tokens), 3, 0.002)
    for each in trace.path():
        metrics.stepped(run_id, each, each.timing.total_s)
    metrics.ended(run_id, trace, 2.0, reason)
    return metrics


def samples(metrics: Metrics) -> dict[tuple, float]:
    """Values by name and the labels beside the model's."""
    text = metrics.exposition()[0].decode()
    return {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != s.MODEL)): sample.value
        for family in families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, *labels: str) -> float:
    return samples(metrics)[(s.PREFIX + name, *sorted(labels))]


def test_it_is_a_watcher():
    assert isinstance(Metrics("m"), Watcher)


def test_counts_are_those_of_the_trace(trace):
    metrics = told(trace, Metrics("m"))
    path = trace.path()
    assert value(metrics, "prompt_tokens_total") == len(trace.run.prompt_tokens)
    assert value(metrics, "generation_tokens_total") == trace.end.new_tokens == 24
    assert value(metrics, "prefix_cache_query_tokens_total") == len(trace.run.prompt_tokens)
    assert value(metrics, "prefix_cache_hit_tokens_total") == 3
    assert value(metrics, "request_success_total", "length") == 1
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 23
    for name, figures in {
        "entropy_nats": [each.entropy_nats for each in path],
        "chosen_probability": [each.prob for each in path],
        "margin_logits": [each.margin_logits for each in path],
        "inter_token_latency_seconds": [each.timing.total_s for each in path[1:]],
    }.items():
        assert value(metrics, f"{name}_sum") == pytest.approx(sum(figures))
        for bound in next(each.buckets for each in s.HISTOGRAMS if each.name == name):
            at_most = sum(figure <= bound for figure in figures)
            assert value(metrics, f"{name}_bucket", repr(bound)) == at_most


def test_the_mass_that_all_stages_left_is_a_product_and_is_only_told_of_steps_with_stages():
    metrics = Metrics("m")
    metrics.stepped("a", step(0), 0.1)
    metrics.stepped("a", step(1, stages=()), 0.1)
    assert value(metrics, "kept_mass_count") == 1
    assert value(metrics, "kept_mass_sum") == 0.25


def test_a_margin_that_does_not_exist_is_not_told():
    metrics = Metrics("m")
    metrics.stepped("a", step(0, margin_logits=float("inf")), 0.1)
    assert value(metrics, "margin_logits_count") == 0


def test_a_loop_is_counted_once_a_request_when_it_has_become_one():
    metrics = Metrics("m")
    for at in range(60):
        metrics.stepped("a", step(at, token_id=at % 3), 0.1)
        metrics.stepped("b", step(at, token_id=at), 0.1)
        assert value(metrics, "loops_detected_total") == (at >= 34)  # 3 tokens that 32 have repeated
    metrics.ended("a", Trace(run=None), 1.0, "stop")
    for at in range(60):  # another request by the same name
        metrics.stepped("a", step(at, token_id=5), 0.1)
    assert value(metrics, "loops_detected_total") == 2


def test_of_a_request_that_has_ended_nothing_is_kept(trace):
    metrics = told(trace, Metrics("m"))
    assert not metrics._finders


def test_nonfinite_logits_are_an_error_and_counted_beside(trace):
    metrics = told(trace, Metrics("m"), reason="nonfinite")
    assert value(metrics, "nonfinite_logits_total") == 1
    assert value(metrics, "request_success_total", "error") == 1
    assert value(metrics, "repetition_ratio_count") == 0, "of an answer that was never finished"


@pytest.mark.parametrize("count, told_of", [(3, 0), (4, 1)])
def test_the_repetition_of_an_answer_needs_four_tokens(trace, count, told_of):
    short = Trace(trace.run, trace.path()[:count])
    metrics = Metrics("m")
    metrics.ended("a", short, 1.0, "stop")
    assert value(metrics, "repetition_ratio_count") == told_of


def test_what_guards_do_is_counted_by_guard_and_action():
    metrics = Metrics("m")
    metrics.stepped("a", step(0, interventions=(STOPPED, replace(STOPPED, action="warn"))), 0.1)
    assert value(metrics, "guard_interventions_total", "loop", "stop") == 1
    assert value(metrics, "guard_interventions_total", "loop", "warn") == 1
    assert value(metrics, "guard_interventions_total", "entropy", "warn") == 0


def test_counters_with_labels_are_there_before_anything_happens():
    metrics = Metrics("m")
    for reason in s.FINISHED_REASONS:
        assert value(metrics, "request_success_total", reason) == 0
    for reason in s.REFUSED_REASONS:
        assert value(metrics, "requests_refused_total", reason) == 0
    metrics.refused("queue_full")
    assert value(metrics, "requests_refused_total", "queue_full") == 1


def test_every_series_has_its_declared_kind_and_help_and_the_models_name(trace):
    metrics = told(trace, Metrics("m", lambda: {each.name: 1.0 for each in s.SERVING_GAUGES}))
    found = {family.name: family for family in families(metrics.exposition()[0].decode())}
    there = [each for each in s.ALL_SERIES if each not in s.DEVICE_GAUGES]
    assert {each.full_name.removesuffix("_total") for each in there} <= set(found)
    for each in there:
        family = found[each.full_name.removesuffix("_total")]
        assert (family.type, family.documentation) == (each.kind, each.help)
        names = {"le"} if each.kind == "histogram" else set()
        for sample in family.samples:
            assert sample.labels[s.MODEL] == "m"
            assert set(sample.labels) - names == {s.MODEL, *each.labels}


def test_nothing_is_exported_that_is_not_declared(trace):
    text = told(trace, Metrics("m")).exposition()[0].decode()
    assert {family.name for family in families(text)} <= {
        each.full_name.removesuffix("_total") for each in s.ALL_SERIES
    }


def test_a_gauge_without_a_value_is_not_there():
    assert not [name for name, *_ in samples(Metrics("m")) if "requests_running" in name]
    assert value(Metrics("m", lambda: {"requests_running": 2}), "requests_running") == 2


def test_the_memory_of_the_process_is_measured_when_it_is_fetched():
    metrics = Metrics("m")
    before = value(metrics, "process_resident_bytes")
    ballast = bytearray(64 << 20)
    ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])
    assert value(metrics, "process_resident_bytes") - before > 48 << 20
    assert value(metrics, "process_peak_resident_bytes") >= before + (48 << 20)
    assert value(metrics, "machine_memory_bytes") > before


def test_exemplars_lead_to_the_run_where_openmetrics_is_asked_for(trace):
    metrics = told(trace, Metrics("m"), "run-17")
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    text, kind = metrics.exposition(accept)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    exemplars = {
        family.name.removeprefix(s.PREFIX): sample.exemplar.labels
        for family in openmetrics_families(text.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars == {each.name: {"run_id": "run-17"} for each in s.HISTOGRAMS}
    plain, kind = metrics.exposition("text/plain")
    assert kind.startswith("text/plain; version=0.0.4") and b"run-17" not in plain


@given(st.text())
def test_no_accept_header_is_too_odd(accept):
    text, kind = Metrics("m", measure=list).exposition(accept)
    assert text and kind.startswith(("text/plain", "application/openmetrics-text"))


def test_the_names_of_models_are_escaped():
    text = Metrics('a"b\\c\nd').exposition()[0].decode()
    assert r'model_name="a\"b\\c\nd"' in text
    assert samples(Metrics('a"b\\c\nd'))[(f"{s.PREFIX}generation_tokens_total",)] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool; ends where it is installed")
def test_promtool_finds_nothing_to_mend(trace):
    text = told(trace, Metrics("m", lambda: {each.name: 1.0 for each in s.SERVING_GAUGES})).exposition()[0]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_names_are_words_with_a_unit_at_the_end_and_no_colon():
    units = ("_seconds", "_bytes", "_nats", "_logits", "_ratio", "_celsius", "_watts", "_total", "_info")
    without = {"chosen_probability", "kept_mass", "requests_running", "requests_waiting"}
    for each in s.ALL_SERIES:
        assert re.fullmatch(r"decodescope_[a-z0-9_]+", each.full_name)
        assert each.name in without or each.name.endswith(units)
        assert each.name.endswith("_total") == (each.kind == "counter")
