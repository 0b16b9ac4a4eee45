"""docs/monitoring.md in both languages: every series with its kind and labels, and none that does not exist."""

import re

import pytest

from decodescope.monitor.series import ALL_SERIES, COUNTERS, GAUGES, HISTOGRAMS
from repository import text

DOCUMENTS = ("docs/monitoring.md", "docs/monitoring.zh-CN.md")
PARTS = (COUNTERS, HISTOGRAMS, GAUGES)


def tables(document: str) -> list[dict[str, list[str]]]:
    """The rows of the tables of counters, histograms and gauges, by the series in their first cell."""
    of_series = text(document).partition("\n## ")[2].partition("\n## ")[0]
    sections = re.split(r"^### .*$", of_series, flags=re.MULTILINE)[1:]
    return [
        {cells[0].strip("`"): cells[1:] for cells in map(row_cells, re.findall(r"^\| `.*$", part, re.MULTILINE))}
        for part in sections
    ]


def row_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split("|")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_series_is_explained_among_its_kind(document):
    for part, rows in zip(PARTS, tables(document), strict=True):
        assert list(rows) == [each.name for each in part]
        assert all(cells[-1] or name == "device_temperature_celsius" for name, cells in rows.items())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_labels_are_those_of_the_series(document):
    counters, _, gauges = tables(document)
    for each in (*COUNTERS, *GAUGES):
        cells = (counters | gauges)[each.name]
        assert tuple(re.findall(r"`(\w+)`", cells[1])) == each.labels


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_series_is_named_that_does_not_exist(document):
    known = {each.full_name for each in ALL_SERIES}
    named = set(re.findall(r"decodescope_[a-z0-9_]{4,}", text(document)))
    suffixed = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert suffixed <= known


def test_both_languages_name_the_same_things():
    first, second = (sorted(re.findall(r"`([^`\n]+)`", text(document))) for document in DOCUMENTS)
    assert first == second
