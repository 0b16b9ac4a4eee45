"""The dashboard: of the structure that Grafana's schema asks for, complete in both languages, over series that exist.

The structure is that of `Dashboard`, schema version 42, in @grafana/schema 13; Grafana itself is not at hand.
"""

import json
import re
from itertools import combinations

import jsonschema
import pytest

from decodescope.locale import LANGUAGES
from decodescope.monitor.dashboard import COLUMNS, dashboard
from decodescope.monitor.dashboard_panels import ROWS
from decodescope.monitor.rules import Pace, recording_groups
from decodescope.monitor.series import ALL_SERIES, DEVICE_GAUGES, PREFIX

# Ids of Grafana's valueFormats that are used here; "suffix:..." is a unit of one's own.
UNITS = ["short", "none", "s", "reqps", "percentunit", "bytes", "celsius", "watt"]
TEXT = {"type": "string", "minLength": 1}
SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "required": ["type", "uid"],
    "additionalProperties": False,
}
GRID = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": COLUMNS - 1},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": COLUMNS},
        "h": {"type": "integer", "minimum": 1},
    },
    "required": ["x", "y", "w", "h"],
    "additionalProperties": False,
}
ROW = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "row"},
        "title": TEXT,
        "collapsed": {"type": "boolean"},
        "gridPos": GRID,
        "panels": {"type": "array", "maxItems": 0},
    },
    "required": ["id", "type", "title", "collapsed", "gridPos", "panels"],
    "additionalProperties": False,
}
TARGET = {
    "type": "object",
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": SOURCE,
        "editorMode": {"enum": ["code", "builder"]},
        "expr": TEXT,
        "legendFormat": TEXT,
        "exemplar": {"type": "boolean"},
        "format": {"enum": ["time_series", "table", "heatmap"]},
        "instant": {"type": "boolean"},
        "range": {"type": "boolean"},
    },
    "required": ["refId", "datasource", "expr", "legendFormat", "exemplar", "format", "instant", "range"],
    "additionalProperties": False,
}
FIELD = {
    "type": "object",
    "properties": {
        "unit": {"anyOf": [{"enum": UNITS}, {"type": "string", "pattern": "^suffix: ?[^ ].*$"}]},
        "min": {"type": "number"},
        "max": {"type": "number"},
        "custom": {"type": "object"},
    },
    "required": ["unit"],
    "additionalProperties": False,
}
PANEL = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["stat", "timeseries", "heatmap"]},
        "title": TEXT,
        "description": TEXT,
        "datasource": SOURCE,
        "gridPos": GRID,
        "fieldConfig": {
            "type": "object",
            "properties": {"defaults": FIELD, "overrides": {"type": "array"}},
            "required": ["defaults", "overrides"],
            "additionalProperties": False,
        },
        "options": {"type": "object", "minProperties": 2},
        "targets": {"type": "array", "items": TARGET, "minItems": 1},
    },
    "required": [
        "id",
        "type",
        "title",
        "description",
        "datasource",
        "gridPos",
        "fieldConfig",
        "options",
        "targets",
    ],
    "additionalProperties": False,
}
VARIABLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]+$"},
        "label": TEXT,
        "type": {"enum": ["query", "datasource"]},
        "datasource": SOURCE,
        "query": {"type": ["string", "object"]},
        "refresh": {"enum": [0, 1, 2]},
        "sort": {"type": "integer", "minimum": 0, "maximum": 8},
        "multi": {"type": "boolean"},
        "includeAll": {"type": "boolean"},
        "allValue": TEXT,
        "current": {"type": "object", "required": ["text", "value"]},
    },
    "required": ["name", "label", "type", "query"],
    "additionalProperties": False,
}
DASHBOARD = {
    "type": "object",
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{8,40}$"},
        "title": TEXT,
        "description": TEXT,
        "tags": {"type": "array", "items": TEXT},
        "schemaVersion": {"const": 42},
        "version": {"type": "integer"},
        "editable": {"type": "boolean"},
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": r"^\d+[smh]$"},
        "time": {"type": "object", "properties": {"from": TEXT, "to": TEXT}, "required": ["from", "to"]},
        "timezone": {"enum": ["browser", "utc"]},
        "annotations": {"type": "object", "required": ["list"]},
        "links": {"type": "array"},
        "templating": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": VARIABLE}},
            "required": ["list"],
            "additionalProperties": False,
        },
        "panels": {"type": "array", "items": {"anyOf": [ROW, PANEL]}, "minItems": 10},
    },
    "required": ["uid", "title", "schemaVersion", "time", "templating", "panels"],
    "additionalProperties": False,
}
PANELS = [panel for row in ROWS.values() for panel in row]


@pytest.fixture(params=LANGUAGES)
def board(request):
    return dashboard(request.param)


def test_the_structure_is_what_grafanas_schema_asks_for(board):
    jsonschema.Draft202012Validator.check_schema(DASHBOARD)
    jsonschema.validate(json.loads(json.dumps(board)), DASHBOARD)


def test_no_panel_lies_on_another_nor_beyond_the_edge(board):
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)


def test_rows_have_no_holes(board):
    """Every line of panels fills the width, but for the last of a row."""
    by_line = {}
    for panel in board["panels"]:
        by_line.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"]["w"])
    lines = [sum(widths) for _, widths in sorted(by_line.items())]
    assert sum(width < COLUMNS for width in lines) <= len(ROWS)


def test_ids_and_query_names_are_used_once(board):
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) == len(PANELS) + len(ROWS)
    for panel in board["panels"]:
        names = [target["refId"] for target in panel.get("targets", [])]
        assert len(names) == len(set(names))


def test_only_variables_that_are_there_are_asked_for(board):
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "job", "instance", "model_name"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used == {*variables, "__rate_interval", "__all"}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert "$job" in target["expr"] and "$instance" in target["expr"]


def test_both_languages_show_the_same_panels_under_names_of_their_own():
    english, chinese = (dashboard(code) for code in LANGUAGES)
    for ours, theirs in zip(english["panels"], chinese["panels"], strict=True):
        assert ours["gridPos"] == theirs["gridPos"] and ours["type"] == theirs["type"]
        assert [t["expr"] for t in ours.get("targets", [])] == [t["expr"] for t in theirs.get("targets", [])]
        assert not re.search("[\u4e00-\u9fff]", ours["title"] + ours.get("description", ""))
        assert re.search("[\u4e00-\u9fff]|KV", theirs["title"])
    assert english["uid"] != chinese["uid"]


def test_panels_ask_for_series_that_exist():
    known = {series.full_name for series in ALL_SERIES} | {"up", "ALERTS"}
    known |= {f"{series.full_name}_bucket" for series in ALL_SERIES if series.kind == "histogram"}
    known |= {rule["record"] for rule in recording_groups(Pace())[0]["rules"]}
    asked = {name for panel in PANELS for query in panel.queries for name in re.findall(r"([\w:]+)\{", query.expr)}
    assert asked - known == set()


def test_everything_that_is_exported_is_shown():
    """In a panel, or in what a rule makes of it."""
    read = " ".join(query.expr for panel in PANELS for query in panel.queries)
    read += " ".join(rule["expr"] for rule in recording_groups(Pace())[0]["rules"])
    names = set(re.findall(rf"{PREFIX}(\w+)", read))
    names |= {re.sub("_(bucket|sum|count)$", "", name) for name in names}
    assert {series.name for series in ALL_SERIES} - names == {"build_info"}


def test_only_histograms_carry_exemplars_and_every_latency_does():
    with_exemplars = {query.expr for panel in PANELS for query in panel.queries if query.exemplar}
    assert all("_bucket{" in expr for expr in with_exemplars)
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "entropy_nats",
    ):
        assert any(f"{PREFIX}{name}_bucket" in expr for expr in with_exemplars)


def test_panels_of_devices_say_so():
    names = {series.name for series in DEVICE_GAUGES}
    for panel in PANELS:
        assert panel.needs_device == any(name in query.expr for query in panel.queries for name in names)


@pytest.mark.parametrize("series", [s for s in ALL_SERIES if s.kind != "counter"], ids=lambda s: s.name)
def test_units_are_those_in_the_names(series):
    """Bytes are shown as bytes, seconds as seconds, ratios in percent, whatever shows them."""
    units = {
        "bytes": "bytes",
        "seconds": "s",
        "celsius": "celsius",
        "watts": "watt",
        "ratio": "percentunit",
        "nats": "suffix: nats",
    }
    ending = series.name.rpartition("_")[2]
    shown = [
        panel.unit
        for panel in PANELS
        for query in panel.queries
        if re.search(rf"\b{series.full_name}(_bucket)?\{{", query.expr)
    ]
    if ending in units and series.name != "entropy_nats":
        assert all(unit == units[ending] for unit in shown)
    if series.name == "entropy_nats":
        assert set(shown) == {"suffix: nats"}
