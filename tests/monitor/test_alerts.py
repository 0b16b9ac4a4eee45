"""Alert rules: each fires in the series of its fault, says what it is about, and is silent in those of a healthy server."""

import re
import string
from dataclasses import dataclass, field

import pytest
from prometheus_server import needs_promtool
from promtool_cases import check_alerts, check_values, grows, labelled, stays

from decodescope.locale import LANGUAGES, catalogue
from decodescope.monitor.alerts import ALERTS, EXAMPLES, Alert, alert_groups
from decodescope.monitor.rules import Pace
from decodescope.monitor.series import HISTOGRAMS, PREFIX
from repository import text

ALL = {alert.name: alert for alert in (*ALERTS, *EXAMPLES)}
# Need an accelerator: shown with recorded series only, for there is none where the live drills run.
DEVICE_ALERTS = {"LlmDeviceMemoryNearlyFull", "LlmDeviceHot"}
UP = 'up{job="decodescope",instance="h:1"}'


def healthy(samples: int = 80) -> dict[str, str]:
    return {
        UP: stays(1, samples),
        labelled(f"{PREFIX}requests_running"): stays(2, samples),
        labelled(f"{PREFIX}generation_tokens_total"): grows(300, samples),
        labelled(f"{PREFIX}kv_cache_reserved_bytes"): stays(50, samples),
        labelled(f"{PREFIX}kv_cache_capacity_bytes"): stays(100, samples),
        labelled(f"{PREFIX}entropy_nats_sum"): grows(300, samples),
        labelled(f"{PREFIX}entropy_nats_count"): grows(300, samples),
        labelled(f"{PREFIX}repetition_ratio_sum"): grows(0.4, samples),
        labelled(f"{PREFIX}repetition_ratio_count"): grows(4, samples),
        labelled(f"{PREFIX}nonfinite_logits_total"): stays(0, samples),
        labelled(f"{PREFIX}loops_detected_total"): f"0x19 1x{samples - 20}",
        labelled(f"{PREFIX}time_to_first_token_seconds_count"): grows(4, samples),
        labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="0.5"): grows(4, samples),
        labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="+Inf"): grows(4, samples),
        labelled(f"{PREFIX}process_resident_bytes"): stays(50, samples),
        labelled(f"{PREFIX}machine_memory_bytes"): stays(100, samples),
        labelled(f"{PREFIX}device_memory_used_bytes", device="cuda:0"): stays(90, samples),
        labelled(f"{PREFIX}device_memory_total_bytes", device="cuda:0"): stays(100, samples),
        labelled(f"{PREFIX}device_temperature_celsius", device="cuda:0"): stays(70, samples),
    }


@dataclass(frozen=True)
class Case:
    """Series that differ from the healthy ones; the value that an alert then shows, at a minute after it began."""

    series: dict[str, str]
    value: float | None
    minute: int = 18
    labels: dict[str, str] = field(default_factory=dict)


def slow(since_s: int = 6000) -> str:
    """20 tokens a second, then 5."""
    samples = since_s // 15
    return f"0+300x{samples} {300 * samples + 75}+75x80"


LONG = 480  # samples: two hours


FAULTS = {
    "LlmTargetDown": Case({UP: stays(0)}, 0),
    "LlmThroughputDrop": Case({labelled(f"{PREFIX}generation_tokens_total"): slow()}, 5, 109),
    "LlmTimeToFirstTokenHigh": Case(
        {
            labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="0.5"): stays(0),
            labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="5.0"): stays(0),
            labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="7.5"): grows(4),
            labelled(f"{PREFIX}time_to_first_token_seconds_bucket", le="+Inf"): grows(4),
        },
        7.375,
    ),
    "LlmKvCacheNearlyFull": Case({labelled(f"{PREFIX}kv_cache_reserved_bytes"): stays(95)}, 0.95),
    "LlmEntropyCollapse": Case({labelled(f"{PREFIX}entropy_nats_sum"): grows(1.5)}, 0.005),
    "LlmEntropyExplosion": Case({labelled(f"{PREFIX}entropy_nats_sum"): grows(1800)}, 6),
    "LlmNonfiniteLogits": Case({labelled(f"{PREFIX}nonfinite_logits_total"): "0x40 1x60"}, None, 12),
    "LlmLoops": Case({labelled(f"{PREFIX}loops_detected_total"): grows(2)}, None),
    "LlmRepetition": Case({labelled(f"{PREFIX}repetition_ratio_sum"): grows(2.8)}, 0.7),
    "LlmProcessMemoryNearlyFull": Case({labelled(f"{PREFIX}process_resident_bytes"): stays(95)}, 0.95),
    "LlmDeviceMemoryNearlyFull": Case({labelled(f"{PREFIX}device_memory_used_bytes", device="cuda:0"): stays(98)}, 0.98, labels={"device": "cuda:0"}),
    "LlmDeviceHot": Case({labelled(f"{PREFIX}device_temperature_celsius", device="cuda:0"): stays(91)}, 91, labels={"device": "cuda:0"}),
    "LlmThroughputLow": Case({labelled(f"{PREFIX}generation_tokens_total"): grows(30)}, 2),
}  # fmt: skip
# Other loads, none of them a fault: no alert of speed may fire.
OTHER_LOADS = {
    "fewer clients": {
        labelled(f"{PREFIX}generation_tokens_total"): slow(),
        labelled(f"{PREFIX}requests_running"): "4x400 1x79",
    },
    "more clients": {labelled(f"{PREFIX}requests_running"): "2x400 8x79"},
    "nobody": {
        labelled(f"{PREFIX}generation_tokens_total"): "0+300x400 120000x79",
        labelled(f"{PREFIX}requests_running"): "2x400 0x79",
    },
}


def said(alert: Alert, case: Case) -> dict[str, str]:
    """The annotations of an alert that fires with this value, in English first."""
    value = case.value or 0
    filled = {
        "instance": "h:1", "model": "m", "device": "cuda:0", "value": f"{value:.3g}", "percent": f"{value * 100:.4g}%",
        "limit": f"{alert.limit:g}", "limit_percent": f"{alert.limit * 100:g}%",
    }  # fmt: skip
    return {
        name + suffix: catalogue(code)[f"alert.{alert.key}.{name}"].format(**filled)
        for code, suffix in (("en", ""), ("zh", "_zh"))
        for name in ("summary", "description")
    }


@needs_promtool
@pytest.mark.parametrize("name", FAULTS)
def test_an_alert_fires_at_its_fault_says_where_and_how_much_and_no_other_one_does(tmp_path, name):
    alert, case = ALL[name], FAULTS[name]
    labels = {"severity": alert.severity, "job": "decodescope", "instance": "h:1"}
    if name != "LlmTargetDown":
        labels |= {"model_name": "m", "engine": "decodescope", **case.labels}
    fired = {"exp_labels": labels, "exp_annotations": said(alert, case)}
    series = healthy(LONG if case.minute > 20 else 80) | case.series
    check_alerts(tmp_path, series, [case.minute], {other: [] for other in ALL} | {name: [fired]})


@needs_promtool
def test_nothing_fires_at_a_healthy_server(tmp_path):
    check_alerts(tmp_path, healthy(LONG), [5, 30, 80, 119], {name: [] for name in ALL})


@needs_promtool
@pytest.mark.parametrize("load", OTHER_LOADS)
def test_another_number_of_clients_is_no_drop_in_speed(tmp_path, load):
    series = healthy(LONG) | OTHER_LOADS[load]
    check_alerts(tmp_path, series, [104, 109, 114, 119], {"LlmThroughputDrop": []})


@needs_promtool
def test_an_alert_waits_as_long_as_it_says(tmp_path):
    full = healthy() | {labelled(f"{PREFIX}kv_cache_reserved_bytes"): "50x39 95x80"}  # full from minute 10 on
    state = 'ALERTS{alertname="LlmKvCacheNearlyFull",alertstate="%s"}'
    labels = (
        labelled("")[:-1]
        + ',engine="decodescope",severity="warning",alertname="LlmKvCacheNearlyFull",alertstate="%s"}'
    )
    check_values(tmp_path, full, 10.75, {state % "firing": [], state % "pending": [(labels % "pending", 1)]})
    check_values(tmp_path, full, 11, {state % "firing": [(labels % "firing", 1)], state % "pending": []})


def test_every_alert_has_its_fault_here_and_those_of_devices_need_a_device():
    assert FAULTS.keys() == ALL.keys()
    assert {name for name, case in FAULTS.items() if case.labels} == DEVICE_ALERTS
    assert {name for name, alert in ALL.items() if "llm:device_" in alert.expr} == DEVICE_ALERTS


def test_thresholds_lie_where_the_histograms_can_tell():
    buckets = {series.name: series.buckets for series in HISTOGRAMS}
    assert ALL["LlmTimeToFirstTokenHigh"].limit in buckets["time_to_first_token_seconds"][:-1]
    for name in ("LlmEntropyCollapse", "LlmEntropyExplosion"):
        assert ALL[name].limit in buckets["entropy_nats"]


def test_names_and_keys_are_ones_own_and_every_threshold_has_its_reason():
    assert len(ALL) == len({alert.key for alert in ALL.values()}) == len(ALERTS) + len(EXAMPLES)
    assert all(len(alert.reason) > 20 for alert in ALL.values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_stand_in_the_chosen_language_first(language):
    other = {"en": "zh", "zh": "en"}[language]
    for rule in alert_groups(language, Pace())[0]["rules"]:
        texts = rule["annotations"]
        assert texts.keys() == {"summary", "description", f"summary_{other}", f"description_{other}"}
        chinese = texts["summary" if language == "zh" else "summary_zh"]
        english = texts["summary" if language == "en" else "summary_en"]
        assert any("\u4e00" <= sign <= "\u9fff" for sign in chinese)
        assert not any("\u4e00" <= sign <= "\u9fff" for sign in english)
        assert "{" not in "".join(text for piece in texts.values() for text in piece.split("{{")[:1])


def test_every_sentence_names_only_what_is_filled_in():
    known = {"instance", "model", "device", "value", "percent", "limit", "limit_percent"}
    for alert in ALL.values():
        for code in LANGUAGES:
            for part in ("summary", "description"):
                sentence = catalogue(code)[f"alert.{alert.key}.{part}"]
                assert {name for _, name, _, _ in string.Formatter().parse(sentence) if name} <= known


@pytest.mark.parametrize("document", ["docs/monitoring.md", "docs/monitoring.zh-CN.md"])
def test_the_documents_tell_every_threshold_and_how_long_it_must_hold(document):
    rows = {cells[1].strip(" `"): cells for line in text(document).splitlines() if (cells := line.split("|"))[1:]}
    for alert in ALERTS:
        _, _, condition, held, *_ = rows[alert.name]
        assert alert.name == "LlmTargetDown" or f"{alert.limit:g}" in re.findall(r"[\d.]+", condition)
        assert held.split()[0] == f"{alert.hold_s:g}"
