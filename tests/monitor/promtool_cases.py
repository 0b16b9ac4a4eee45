"""`promtool test rules` from Python: series that come in, values or alerts that must come out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_server import promtool

from decodescope.monitor.alerts import ALERTS, EXAMPLES, alert_groups
from decodescope.monitor.rules import Pace, recording_groups
from decodescope.monitor.yaml_text import yaml_text

INTERVAL_S = 15
Series = Mapping[str, str]  # name with labels: values as promtool writes them


def labelled(name: str, job: str = "decodescope", **more: str) -> str:
    """A series of the one server that all cases watch; llama-server names no model."""
    labels = {"job": job, "instance": "h:1", "model_name": "m", **more}
    if job == "llamacpp":
        del labels["model_name"]
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def recorded(engine: str = "decodescope") -> str:
    """The labels of what is recorded of it."""
    return labelled("", engine)[:-1] + f',engine="{engine}"}}'


def grows(step: float, samples: int = 80) -> str:
    """A counter that grows by `step` from sample to sample."""
    return f"0+{step}x{samples}"


def stays(value: float, samples: int = 80) -> str:
    """A gauge that stays where it is."""
    return f"{value}x{samples}"


def check_values(
    folder: Path, series: Series, minute: float, expected: Mapping[str, Iterable[tuple[str, float]]]
) -> None:
    """Each expression must give exactly the labels and values (to six digits) that are expected of it."""
    tests = [
        {
            "expr": f"round({expr}, 0.000001)",
            "eval_time": f"{60 * minute:.0f}s",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for expr, samples in expected.items()
    ]
    _run(folder, series, {"promql_expr_test": tests})


def check_alerts(
    folder: Path, series: Series, minutes: Iterable[int], fired: Mapping[str, Sequence[dict[str, object]]]
) -> None:
    """Each alert must fire exactly as often, and say exactly what is expected; with an empty list, not at all."""
    tests = [
        {"alertname": name, "eval_time": f"{minute}m", "exp_alerts": alerts}
        for minute in minutes
        for name, alerts in fired.items()
    ]
    _run(folder, series, {"alert_rule_test": tests})


def _run(folder: Path, series: Series, checks: dict[str, object]) -> None:
    """The examples too: what is off by default must work when switched on."""
    pace = Pace()
    recording, alerts = recording_groups(pace), alert_groups("en", pace, (*ALERTS, *EXAMPLES))
    (folder / "recording.yml").write_text(yaml_text({"groups": recording}))
    (folder / "alerts.yml").write_text(yaml_text({"groups": alerts}), encoding="utf-8")
    case = {
        "interval": f"{INTERVAL_S}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        **checks,
    }
    whole = {
        "rule_files": ["recording.yml", "alerts.yml"],
        "evaluation_interval": f"{INTERVAL_S}s",
        "group_eval_order": [group["name"] for group in (*recording, *alerts)],  # any order, if not told
        "tests": [case],
    }
    path = folder / "test.yml"
    path.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    promtool("test", "rules", path)
