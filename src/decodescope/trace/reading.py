"""Rows of the database as records; what comes from a file is checked before it is believed."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from decodescope.errors import InputError
from decodescope.trace.records import Candidate, End, Kv, Memory, PromptToken, Run, Setting, Stage, Step, Timing
from decodescope.trace.tables import (
    CANDIDATE,
    ENDING,
    FILTER,
    KINDS,
    NODE,
    NOTE,
    PROMPT_TOKEN,
    RUN,
    SETTING,
    STAGE,
    STOP,
    VERSION,
    Row,
    Table,
)

# Columns whose values are not taken as they are: where, and how each is read.
_Readings = list[tuple[int, Callable[[Any], Any]]]


class RowReader:
    """Reads whole tables of a file that may have been damaged or made up.

    Every value has its column's type, keys strictly grow (so no page of the file is read in circles), and
    all text together is no longer than the file. Raises InputError where that does not hold.
    """

    def __init__(self, connection: sqlite3.Connection, path: object, size: int) -> None:
        self._connection, self._path, self._budget = connection, path, size
        self._version = int(connection.execute("PRAGMA user_version").fetchone()[0])

    def rows(self, table: Table) -> Iterator[Row]:
        """All rows in key order, each value as its column's kind reads it; none where an older format lacks it."""
        if table.since > self._version:
            return
        known: dict[Row, _Readings] = {}
        last: Row | None = None
        for row in self._connection.execute(table.select):
            signature = tuple(map(type, row))
            if signature not in known:
                known[signature] = self._readings(table, signature)
            if last is not None and row[: table.key] <= last:
                raise self._damaged(f"{table.name}: {row[: table.key]}")
            last = row[: table.key]
            self._spend(table, row)
            yield self._read(table, row, known[signature]) if known[signature] else row

    def one(self, table: Table) -> Row | None:
        """The only row of a table, if it has any."""
        return next(self.rows(table), None)

    def _damaged(self, place: str) -> InputError:
        return InputError("trace.damaged", path=self._path, reason=place)

    def _readings(self, table: Table, signature: Row) -> _Readings:
        readings = []
        for index, (column, found) in enumerate(zip(table.columns, signature, strict=True)):
            kind = KINDS[column.kind]
            if found not in kind.types:
                raise self._damaged(f"{table.name}.{column.name}: {found.__name__}")
            # A measured number is taken as it is; only its absence is read as something else.
            if kind.read and found is not float:
                readings.append((index, kind.read))
        return readings

    def _spend(self, table: Table, row: Row) -> None:
        self._budget -= len("".join([value for value in row if type(value) is str]))
        if self._budget < 0:
            raise self._damaged(table.name)

    def _read(self, table: Table, row: Row, readings: _Readings) -> Row:
        values = list(row)
        for index, read in readings:
            try:
                values[index] = read(values[index])
            except (ValueError, RecursionError):
                place = f"{table.name}.{table.columns[index].name}"
                raise self._damaged(f"{place}: {values[index][:20]!r}") from None
        return tuple(values)

    def run(self) -> Run | None:
        """The header of the run, None when nothing was recorded yet."""
        row = self.one(RUN)
        if row is None:
            return None
        stops = list(self.rows(STOP))
        return Run(
            **RUN.fields(row),
            prompt_tokens=tuple(PromptToken(*values) for _, *values in self.rows(PROMPT_TOKEN)),
            settings=tuple(self._setting(*values) for _, *values in self.rows(SETTING)),
            stop_ids=tuple(token_id for _, token_id, _ in stops if token_id is not None),
            stop_strings=tuple(string for _, _, string in stops if string is not None),
            versions={name: version for _, name, version in self.rows(VERSION)},
            notes=tuple(note for _, note in self.rows(NOTE)),
        )

    def _setting(self, value_type: str, name: str, value: Any, origin: str) -> Setting:
        if value_type == "bool" and type(value) is int:
            value = bool(value)
        if type(value).__name__ != value_type:
            raise self._damaged(f"setting.value_type: {value_type[:20]!r}")
        return Setting(name, value, origin)

    def steps(self) -> list[Step]:
        """All steps in the order they were made, every parent before its children."""
        candidates, stages = self._candidates(), self._stages()
        made: set[int | None] = {None}
        steps = []
        for row in self.rows(NODE):
            node, parent = row[:2]
            if parent not in made:
                raise self._damaged(f"node.parent_id: {parent}")
            made.add(node)
            steps.append(_step(row, tuple(candidates.pop(node, ())), tuple(stages.pop(node, ()))))
        return steps

    def _candidates(self) -> dict[int, list[Candidate]]:
        found: dict[int, list[Candidate]] = defaultdict(list)
        for node, _, *values in self.rows(CANDIDATE):
            found[node].append(Candidate(*values))
        return found

    def _stages(self) -> dict[int, list[Stage]]:
        filters = {number: filtering for number, *filtering in self.rows(FILTER)}
        found: dict[int, list[Stage]] = defaultdict(list)
        for node, _, filter_id, *values in self.rows(STAGE):
            if filter_id not in filters:
                raise self._damaged(f"stage.filter_id: {filter_id}")
            found[node].append(Stage(*filters[filter_id], *values))
        return found

    def end(self, steps: list[Step], folder: str) -> End | None:
        """The end record, if the run came to one; `folder` is where the trace lies now."""
        row = self.one(ENDING)
        if row is None:
            return None
        end = End(**ENDING.fields(row), trace=folder)
        if end.node is not None and end.node not in {step.node for step in steps}:
            raise self._damaged(f"ending.node_id: {end.node}")
        return end


def _step(row: Row, candidates: tuple[Candidate, ...], stages: tuple[Stage, ...]) -> Step:
    fields = NODE.fields(row)
    inner = {"kv": Kv(**fields["kv"]), "timing": Timing(**fields["timing"]), "memory": Memory(**fields["memory"])}
    return Step(**fields | inner, candidates=candidates, stages=stages)
