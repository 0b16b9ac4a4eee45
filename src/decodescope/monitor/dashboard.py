"""The Grafana dashboard, made from the panels: JSON after Grafana's schema 42 (`Dashboard` of @grafana/schema)."""

from collections.abc import Iterator
from typing import Any

from decodescope.locale import catalogue
from decodescope.monitor.dashboard_panels import JOBS, ROWS, SHARE, TARGET, Panel, Query

SCHEMA_VERSION = 42
COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


def dashboard_uid(language: str) -> str:
    """What Grafana knows the dashboard by."""
    return f"decodescope-{language}"


def dashboard(language: str) -> Json:
    """The whole dashboard, its titles and descriptions in `language`."""
    words = catalogue(language)
    return {
        "uid": dashboard_uid(language),
        "title": words["dashboard.title"],
        "description": words["dashboard.description"],
        "tags": ["decodescope", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_variables(words))},
        "panels": list(_panels(words)),
    }


def _variables(words: dict[str, str]) -> Iterator[Json]:
    yield {
        "name": "datasource",
        "label": words["dashboard.variable.datasource"],
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    for name, query in (
        ("job", f'label_values(up{{job=~"{JOBS}"}}, job)'),
        ("instance", 'label_values(up{job=~"$job"}, instance)'),
        ("model_name", f"label_values(llm:requests_running{{{TARGET}}}, model_name)"),
    ):
        yield {
            "name": name,
            "label": words[f"dashboard.variable.{name}"],
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # whenever the time range changes
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": JOBS if name == "job" else ".*",  # llama-server names no model
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(words: dict[str, str]) -> Iterator[Json]:
    """Rows from top to bottom; in each, panels from left to right as far as they fit."""
    y, number = 0, 1
    for key, panels in ROWS.items():
        yield _row(number, words[f"dashboard.row.{key}"], y)
        y, x, number, tallest = y + 1, 0, number + 1, 0
        for panel in panels:
            height = _HEIGHTS[panel.kind]
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield _panel(panel, number, place, words)
            x, number, tallest = x + panel.width, number + 1, max(tallest, height)
        y += tallest


def _row(number: int, title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: Json, words: dict[str, str]) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": words[f"panel.{panel.key}.title"],
        "description": words[f"panel.{panel.key}.description"],
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind](panel),
        "targets": [_target(panel, i, query, words) for i, query in enumerate(panel.queries)],
    }


def _field(panel: Panel) -> Json:
    field: Json = {"unit": panel.unit, "min": 0}
    if panel.unit == SHARE:
        field["max"] = 1
    if panel.kind == "timeseries":
        field["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "auto"}
    return field


def _target(panel: Panel, index: int, query: Query, words: dict[str, str]) -> Json:
    word = words.get(f"panel.word.{query.word}", query.word)
    labels = [f"{{{{{label}}}}}" for label in query.by]
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": " ".join([word, *labels] if word else labels) or words[f"panel.{panel.key}.title"],
        "exemplar": query.exemplar,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": panel.kind == "stat",
        "range": panel.kind != "stat",
    }


def _lines(panel: Panel) -> Json:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _figure(panel: Panel) -> Json:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }


def _heat(panel: Panel) -> Json:
    return {
        "calculate": False,  # the series are buckets already
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Spectral",
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": True,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit, "reverse": False},
    }


_OPTIONS = {"timeseries": _lines, "stat": _figure, "heatmap": _heat}
