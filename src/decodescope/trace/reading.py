"""Rows of the database as records; what comes from a file is checked before it is believed."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from decodescope.errors import InputError
from decodescope.trace.ends import end_of, of_fork, stopping_guard
from decodescope.trace.records import (
    Branch,
    Candidate,
    End,
    Intervention,
    Kv,
    Memory,
    PromptToken,
    Run,
    Setting,
    Stage,
    Step,
    Timing,
    path_to,
)
from decodescope.trace.tables import (
    BRANCH,
    BRANCH_SETTING,
    CANDIDATE,
    DRAW,
    ENDING,
    FILTER,
    INTERVENTION,
    KINDS,
    KV_CACHE,
    MATRICES,
    NODE,
    NOTE,
    PROMPT_TOKEN,
    REOPENED,
    RUN,
    SETTING,
    STAGE,
    STAGE_PROB,
    STOP,
    VERSION,
    Row,
    Table,
)

# Columns whose values are not taken as they are: where, and how each is read.
_Readings = list[tuple[int, Callable[[Any], Any]]]
# None of our own tables has either: the indexes of their keys have no definition.
_ACTING = "SELECT 1 FROM sqlite_schema WHERE type IN ('trigger', 'index') AND sql IS NOT NULL"


class RowReader:
    """Reads whole tables of a file that may have been damaged or made up.

    Every value has its column's type, keys strictly grow (so no page of the file is read in circles), and
    all text together is no longer than the file. Raises InputError where that does not hold.
    """

    def __init__(self, connection: sqlite3.Connection, path: object, size: int) -> None:
        self._connection, self._path, self._budget = connection, path, size
        self._version = int(connection.execute("PRAGMA user_version").fetchone()[0])

    def rows(self, table: Table, first: int | None = None) -> Iterator[Row]:
        """All rows in key order, each value as its column's kind reads it; none where an older format lacks it.

        `first`: only those whose first column is not below it.
        """
        if table.since > self._version:
            return
        known: dict[Row, _Readings] = {}
        last: Row | None = None
        asked = (table.select,) if first is None else (table.select_from, (first,))
        for row in self._connection.execute(*asked):
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
        stops, cache, matrices = list(self.rows(STOP)), self.one(KV_CACHE), self.one(MATRICES)
        return Run(
            **RUN.fields(row),
            prompt_tokens=tuple(PromptToken(*values) for _, *values in self.rows(PROMPT_TOKEN)),
            settings=tuple(self._setting(*values) for _, *values in self.rows(SETTING)),
            stop_ids=tuple(token_id for _, token_id, _ in stops if token_id is not None),
            stop_strings=tuple(string for _, _, string in stops if string is not None),
            versions={name: version for _, name, version in self.rows(VERSION)},
            notes=tuple(note for _, note in self.rows(NOTE)),
            cache_dtype=None if cache is None else cache[1],
            weights=None if matrices is None else matrices[1],
        )

    def _setting(self, value_type: str, name: str, value: Any, origin: str) -> Setting:
        if value_type == "bool" and type(value) is int:
            value = bool(value)
        if type(value).__name__ != value_type:
            raise self._damaged(f"setting.value_type: {value_type[:20]!r}")
        return Setting(name, value, origin)

    def steps(self, bare: bool = False, first: int | None = None) -> list[Step]:
        """All steps in the order they were made, every parent before its children; or those from node `first` on.

        `bare` ones lack candidates and stages, nine tenths of the work.
        """
        candidates, stages = ({}, {}) if bare else (self._candidates(first), self._stages(first))
        interventions = self._interventions(first)
        draws: dict[int, float] = dict(self.rows(DRAW, first))
        made: set[int | None] = {None}
        steps = []
        for row in self.rows(NODE, first):
            node, parent = row[:2]
            if parent not in made and (first is None or parent >= first):
                raise self._damaged(f"node.parent_id: {parent}")
            made.add(node)
            step = Step(
                **_measured(row),
                candidates=tuple(candidates.pop(node, ())),
                stages=tuple(stages.pop(node, ())),
                mass_above=draws.get(node),
                interventions=tuple(interventions.pop(node, ())),
            )
            if any(len(stage.probs) not in (0, len(step.candidates)) for stage in step.stages):
                raise self._damaged(f"stage_prob.candidate: {node}")
            steps.append(step)
        return steps

    def _candidates(self, first: int | None) -> dict[int, list[Candidate]]:
        found: dict[int, list[Candidate]] = defaultdict(list)
        for node, _, *values in self.rows(CANDIDATE, first):
            found[node].append(Candidate(*values))
        return found

    def _stages(self, first: int | None) -> dict[int, list[Stage]]:
        filters = {number: filtering for number, *filtering in self.rows(FILTER)}
        probs = self._stage_probs(first)
        found: dict[int, list[Stage]] = defaultdict(list)
        for node, ordinal, filter_id, survivors, kept_mass, entropy_nats in self.rows(STAGE, first):
            if filter_id not in filters:
                raise self._damaged(f"stage.filter_id: {filter_id}")
            name, settings = filters[filter_id]
            after = tuple(probs.pop((node, ordinal), ()))
            found[node].append(Stage(name, settings, survivors, kept_mass, entropy_nats, after))
        return found

    def _stage_probs(self, first: int | None) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for node, stage, candidate, prob in self.rows(STAGE_PROB, first):
            if candidate != len(found[node, stage]):
                raise self._damaged(f"stage_prob.candidate: {candidate}")
            found[node, stage].append(prob)
        return found

    def _interventions(self, first: int | None) -> dict[int, list[Intervention]]:
        found: dict[int, list[Intervention]] = defaultdict(list)
        for node, _, *values in self.rows(INTERVENTION, first):
            found[node].append(Intervention(*values))
        return found

    def end(self, steps: list[Step]) -> End | None:
        """The end record, if the run came to one."""
        row = self.one(ENDING)
        return None if row is None else self._end(ENDING, ENDING.fields(row), _by_node(steps))

    def _end(self, table: Table, fields: dict[str, Any], steps: dict[int, Step]) -> End:
        node = fields["node"]
        if node is not None and node not in steps:
            raise self._damaged(f"{table.name}.node_id: {node}")
        guard = stopping_guard(fields["finish_reason"], steps.get(node))
        return End(**fields, stop_guard=guard)

    def branches(self, run: Run, steps: list[Step]) -> list[Branch]:
        """All forks in the order in which they ended; one that came to no end is the last, as `interrupted`."""
        settings, known, begun = self._branch_settings(), _by_node(steps), list(self.rows(REOPENED))
        number, settled = 0, begun[-1][2] if begun else 0
        found = []
        for row in self.rows(BRANCH):
            number, settled = row[0], max(row[1], settled)
            fields = BRANCH.fields(row)
            if fields["step"] < 0:
                raise self._damaged(f"branch.step: {fields['step']}")
            end = self._end(BRANCH, fields.pop("end"), known)
            found.append(Branch(**fields, settings=tuple(settings.get(number, ())), end=end))
        if begun and steps and steps[-1].node >= settled:
            path = path_to(steps, steps[-1].node)
            first = sum(step.node < settled for step in path)
            end = of_fork(end_of(run, path, "interrupted"), run, path, first)
            found.append(Branch(first, tuple(settings.get(number + 1, ())), begun[-1][1], end))
        return found

    def _branch_settings(self) -> dict[int, list[Setting]]:
        found: dict[int, list[Setting]] = defaultdict(list)
        for number, _, *values in self.rows(BRANCH_SETTING):
            found[number].append(self._setting(*values))
        return found

    def first_fork_node(self) -> int | None:
        """The id from which on nodes are of forks; None where none was ever begun."""
        row = self.one(REOPENED)
        return None if row is None else int(row[2])

    def acts(self) -> bool:
        """Whether something of someone else's could act when rows are added: a trigger or an index."""
        return self._connection.execute(_ACTING).fetchone() is not None


def _by_node(steps: list[Step]) -> dict[int, Step]:
    return {step.node: step for step in steps}


def _measured(row: Row) -> dict[str, Any]:
    """The fields of a step that are in its own row."""
    fields = NODE.fields(row)
    inner = {"kv": Kv(**fields["kv"]), "timing": Timing(**fields["timing"]), "memory": Memory(**fields["memory"])}
    return fields | inner
