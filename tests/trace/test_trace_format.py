"""docs/trace-format.md cannot lie: its queries run, its tables are the file's."""

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import TABLES, plain_branch, plain_end, plain_run, plain_step

from decodescope.trace.ends import end_of
from decodescope.trace.saved import read_trace
from decodescope.trace.schema import APPLICATION_ID, FORMAT
from decodescope.trace.store import TraceWriter

DOCUMENT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented") / "run"
    with TraceWriter.create(folder, plain_run()) as writer:
        for node, parent in {0: None, 1: 0, 2: 1, 3: 0, 4: 3}.items():
            writer.write(plain_step(node, parent))
        writer.finish(replace(plain_end(), node=2))
    for node, parent, logprob in ((5, 0, -0.5), (6, 2, -4.0)):
        with TraceWriter.reopen(folder) as writer:
            writer.write(replace(plain_step(node, parent), logprob_nats=logprob))
            writer.write_branch(
                replace(plain_branch(node, node - 4), end=replace(plain_end(f"f{node}"), node=node))
            )
    connection = sqlite3.connect(folder / "trace.db")
    yield connection
    connection.close()


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_a_documented_query_runs_and_answers(connection, query):
    assert connection.execute(query).fetchall()


def test_the_documented_answers_are_right(connection):
    answers = [connection.execute(query).fetchall() for query in QUERIES]
    text, unsure, filters, _, parting, forks, settings = answers
    assert text == [(" w0 w1 w2",)]
    assert [row[0] for row in unsure] == [6] * 5 + [5] * 5 + [4] * 5
    assert [row[0] for row in filters] == ["top_k", "temperature"]
    assert parting == [(0, 3, "tok1 | tok1 | tok1")]
    assert [row[:3] for row in forks] == [(1, "f5", "length"), (2, "f6", "length")]
    assert [row[3] for row in forks] == pytest.approx([-0.7 - 0.5, 3 * -0.7 - 4.0])
    assert settings == [("temperature", 0.7, "command line"), ("top_k", 20, "default")]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_and_column_is_documented(table):
    assert f"`{table.name}`" in DOCUMENT
    missing = [column.name for column in table.columns if f"`{column.name}`" not in DOCUMENT]
    assert not missing


def test_the_marks_are_documented():
    assert f"`PRAGMA application_id` is {APPLICATION_ID}" in DOCUMENT
    assert f"`PRAGMA user_version` is the format, now {FORMAT}." in DOCUMENT


@pytest.mark.parametrize("end", [None, end_of(plain_run(), [], "interrupted")])
def test_the_documented_text_is_that_of_the_trace(tmp_path, end):
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        for node, parent in {0: None, 1: 0, 2: 0}.items():
            writer.write(plain_step(node, parent))
        if end:
            writer.finish(end)
    connection = sqlite3.connect(tmp_path / "run" / "trace.db")
    ((text,),) = connection.execute(QUERIES[0]).fetchall()
    connection.close()
    assert (text or "") == read_trace(tmp_path / "run").text
