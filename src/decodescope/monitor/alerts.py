"""Alert rules: every threshold in one table, each with its reason. They look at what `monitor.rules` records."""

from dataclasses import dataclass
from typing import Literal

from decodescope.locale import LANGUAGES, catalogue
from decodescope.monitor.rules import ENGINES, Pace, Rule
from decodescope.monitor.yaml_text import COMMENT


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert: `expr` with `{limit}` for the threshold must hold for `hold_s` seconds before it fires.

    What it says stands in the catalogues, under `alert.{key}.summary` and `.description`.
    """

    name: str
    key: str
    expr: str
    limit: float
    hold_s: float
    severity: Literal["warning", "critical"]
    reason: str


ALERTS = (
    Alert(
        "LlmTargetDown", "target_down",
        f'up{{{{job=~"{"|".join(ENGINES)}"}}}} == {{limit}}', 0, 60, "critical",
        "a single lost scrape is noise, four in a row are not",
    ),
    Alert(
        "LlmThroughputDrop", "throughput_drop",
        "llm:tokens_per_second:busy < {limit} * llm:tokens_per_second:usual and "
        "llm:tokens_per_second_per_request:busy < {limit} * llm:tokens_per_second_per_request:usual",
        0.5, 300, "warning",
        "half of the server's own median of the hour before: other prompts change the speed, but not so much",
    ),
    Alert(
        "LlmTimeToFirstTokenHigh", "ttft_high", "llm:ttft_seconds:p95 > {limit}", 5, 300, "warning",
        "seconds a person will wait for a first word; it must stay below 10, where the buckets end",
    ),
    Alert(
        "LlmKvCacheNearlyFull", "kv_cache_full", "llm:kv_cache_usage_ratio > {limit}", 0.9, 60, "warning",
        "the next long prompt has to wait, and what is running cannot grow much",
    ),
    Alert(
        "LlmEntropyCollapse", "entropy_collapse", "llm:entropy_nats:mean < {limit}", 0.01, 600, "warning",
        "nats over all requests: passages of good code are this certain, but not all answers of ten minutes",
    ),
    Alert(
        "LlmEntropyExplosion", "entropy_explosion", "llm:entropy_nats:mean > {limit}", 5, 120, "warning",
        "nats: no 16 tokens of 100 ordinary answers passed 4.5; a uniform choice among 150,000 tokens has 11.9",
    ),
    Alert(
        "LlmNonfiniteLogits", "nonfinite", "llm:nonfinite_logits:increase > {limit}", 0, 0, "critical",
        "one NaN is one too many: the weights or the arithmetic are broken",
    ),
    Alert(
        "LlmLoops", "loops", "llm:loops:increase > {limit} * llm:answers_begun:increase", 0.1, 60, "warning",
        "one answer in ten going round in circles; small models loop now and then when greedy",
    ),
    Alert(
        "LlmRepetition", "repetition", "llm:repetition_ratio:mean > {limit}", 0.5, 300, "warning",
        "half of all 4-grams stood in the answer before; tables and code rarely come to that on average",
    ),
    Alert(
        "LlmProcessMemoryNearlyFull", "process_memory",
        "llm:process_memory_usage_ratio > {limit}", 0.9, 120, "critical",
        "of what the process may have: beyond it the kernel ends it without a word, or gives it no more",
    ),
    Alert(
        "LlmDeviceMemoryNearlyFull", "device_memory",
        "llm:device_memory_usage_ratio > {limit}", 0.95, 300, "warning",
        "engines that reserve memory beforehand stay near 0.9 all the time",
    ),
    Alert(
        "LlmDeviceHot", "device_hot", "llm:device_temperature_celsius > {limit}", 85, 300, "warning",
        "degrees Celsius: most accelerators begin to slow themselves down a few degrees above",
    ),
)  # fmt: skip
# The articles' rule. Off: what is slow depends on the model and the machine, and five is fast for some.
EXAMPLES = (
    Alert(
        "LlmThroughputLow", "throughput_low", "llm:tokens_per_second:busy < {limit}", 5, 120, "warning",
        "tokens per second of a busy server: a figure that only you can choose",
    ),
)  # fmt: skip

# What Prometheus fills in when an alert fires.
_FILLED = {
    "instance": "{{ $labels.instance }}",
    "model": "{{ $labels.model_name }}",
    "device": "{{ $labels.device }}",
    "value": '{{ printf "%.3g" $value }}',
    "percent": "{{ $value | humanizePercentage }}",
}


def alert_groups(language: str, pace: Pace, alerts: tuple[Alert, ...] = ALERTS) -> list[Rule]:
    """The rules in the shape of a rule file's `groups`, their texts in `language` first and then in the others."""
    return [
        {"name": "llm_alerts", "interval": pace.scrape, "rules": [_rule(each, language, pace) for each in alerts]}
    ]


def _rule(alert: Alert, language: str, pace: Pace) -> Rule:
    held = {"for": pace.span(alert.hold_s)} if alert.hold_s else {}
    return {
        COMMENT: alert.reason,
        "alert": alert.name,
        "expr": alert.expr.format(limit=f"{alert.limit:g}"),
        **held,
        "labels": {"severity": alert.severity},
        "annotations": _texts(alert, language),
    }


def _texts(alert: Alert, language: str) -> dict[str, str]:
    others = [code for code in LANGUAGES if code != language]
    return {
        name + (f"_{code}" if code != language else ""): _text(alert, name, code)
        for code in (language, *others)
        for name in ("summary", "description")
    }


def _text(alert: Alert, name: str, language: str) -> str:
    sentence = catalogue(language)[f"alert.{alert.key}.{name}"]
    return sentence.format(limit=f"{alert.limit:g}", limit_percent=f"{alert.limit * 100:g}%", **_FILLED)
