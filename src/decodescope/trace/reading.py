"""Rows of the database as records; what comes from a file is checked before it is believed."""

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from decodescope.errors import InputError
from decodescope.trace.records import (
    Candidate,
    End,
    FinishReason,
    Kv,
    Memory,
    PromptToken,
    Run,
    Setting,
    Stage,
    Step,
    Timing,
)
from decodescope.trace.tables import (
    CANDIDATE,
    ENDING,
    FILTER,
    MISSING,
    NODE,
    NOTE,
    PROMPT_TOKEN,
    RUN,
    SETTING,
    STAGE,
    STOP,
    TYPES,
    VERSION,
    Row,
    Table,
)


class RowReader:
    """Reads whole tables of a file that may have been damaged or made up.

    Every value has its column's type, keys strictly grow (so no page of the file is read in circles), and
    all text together is no longer than the file. Raises InputError where that does not hold.
    """

    def __init__(self, connection: sqlite3.Connection, path: object, size: int) -> None:
        self._connection, self._path, self._budget = connection, path, size

    def damaged(self, place: str) -> InputError:
        """The fault to raise for a place that makes no sense."""
        return InputError("trace.damaged", path=self._path, reason=place)

    def rows(self, table: Table) -> Iterator[Row]:
        """All rows in key order, NULL measurements as NaN."""
        known: dict[Row, list[int]] = {}
        last: Row | None = None
        for row in self._connection.execute(table.select):
            signature = tuple(map(type, row))
            if signature not in known:
                known[signature] = self._gaps(table, signature)
            if last is not None and row[: table.key] <= last:
                raise self.damaged(f"{table.name}: {row[: table.key]}")
            last = row[: table.key]
            self._spend(table, row)
            yield _filled(row, known[signature]) if known[signature] else row

    def one(self, table: Table) -> Row | None:
        """The only row of a table, if it has any."""
        return next(iter(self.rows(table)), None)

    def _gaps(self, table: Table, signature: Row) -> list[int]:
        for (name, kind), found in zip(table.columns, signature, strict=True):
            if found not in TYPES[kind]:
                raise self.damaged(f"{table.name}.{name}: {found.__name__}")
        kinds = (kind for _, kind in table.columns)
        return [i for i, kind in enumerate(kinds) if kind == "real" and signature[i] is MISSING]

    def _spend(self, table: Table, row: Row) -> None:
        self._budget -= len("".join([value for value in row if type(value) is str]))
        if self._budget < 0:
            raise self.damaged(table.name)

    def run(self) -> Run | None:
        """The header of the run, None when nothing was recorded yet."""
        row = self.one(RUN)
        if row is None:
            return None
        head = {name: value for (name, _), value in zip(RUN.columns[1:], row[1:], strict=True)}
        stops = list(self.rows(STOP))
        return Run(
            **head | {"use_cache": bool(head["use_cache"])},
            prompt_tokens=tuple(self._prompt_token(row) for row in self.rows(PROMPT_TOKEN)),
            settings=tuple(self._setting(row) for row in self.rows(SETTING)),
            stop_ids=tuple(token_id for _, token_id, _ in stops if token_id is not None),
            stop_strings=tuple(string for _, _, string in stops if string is not None),
            versions={name: version for _, name, version in self.rows(VERSION)},
            notes=tuple(note for _, note in self.rows(NOTE)),
        )

    def _prompt_token(self, row: Row) -> PromptToken:
        _, position, token_id, text, bytes_hex, role, injected, partial = row
        self._check_hex(PROMPT_TOKEN, bytes_hex)
        return PromptToken(position, token_id, text, bytes_hex, role, bool(injected), bool(partial))

    def _check_hex(self, table: Table, bytes_hex: str) -> None:
        try:
            bytes.fromhex(bytes_hex)
        except ValueError:
            raise self.damaged(f"{table.name}.bytes_hex: {bytes_hex[:20]!r}") from None

    def _setting(self, row: Row) -> Setting:
        _, name, value, value_type, origin = row
        if value_type == "bool" and type(value) is int:
            value = bool(value)
        if type(value).__name__ != value_type:
            raise self.damaged(f"setting.value_type: {value_type[:20]!r}")
        return Setting(name, value, origin)

    def steps(self) -> list[Step]:
        """All steps in the order they were made, every parent before its children."""
        candidates, stages = self._candidates(), self._stages()
        made: set[int | None] = {None}
        steps = []
        for row in self.rows(NODE):
            node, parent, bytes_hex = row[0], row[1], row[6]
            if parent not in made:
                raise self.damaged(f"node.parent_id: {parent}")
            made.add(node)
            self._check_hex(NODE, bytes_hex)
            steps.append(_step(row, tuple(candidates.pop(node, ())), tuple(stages.pop(node, ()))))
        return steps

    def _candidates(self) -> dict[int, list[Candidate]]:
        found: dict[int, list[Candidate]] = defaultdict(list)
        for node, _, *values in self.rows(CANDIDATE):
            self._check_hex(CANDIDATE, values[3])
            found[node].append(Candidate(*values))
        return found

    def _stages(self) -> dict[int, list[Stage]]:
        filters = {row[0]: (row[1], self._settings(row[2])) for row in self.rows(FILTER)}
        found: dict[int, list[Stage]] = defaultdict(list)
        for node, _, filter_id, survivors, kept_mass, entropy in self.rows(STAGE):
            if filter_id not in filters:
                raise self.damaged(f"stage.filter_id: {filter_id}")
            found[node].append(Stage(*filters[filter_id], survivors, kept_mass, entropy))
        return found

    def _settings(self, text: str) -> dict[str, Any]:
        try:
            settings = json.loads(text)
            json.dumps(settings, allow_nan=False)
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise self.damaged("sampler_filter.settings")
        return settings

    def shape(self, text: str) -> tuple[int, ...]:
        """A tensor's shape as the index holds it."""
        try:
            shape = json.loads(text)
        except (ValueError, RecursionError):
            shape = None
        if not isinstance(shape, list) or any(type(size) is not int for size in shape):
            raise self.damaged(f"tensor.shape: {text[:20]!r}")
        return tuple(shape)

    def end(self, folder: str) -> End | None:
        """The end record, if the run came to one; `folder` is where the trace lies now."""
        row = self.one(ENDING)
        if row is None:
            return None
        values = {name: value for (name, _), value in zip(ENDING.columns[1:], row[1:], strict=True)}
        if values["finish_reason"] not in get_args(FinishReason):
            raise self.damaged(f"ending.finish_reason: {values['finish_reason'][:20]!r}")
        return End(**values, trace=folder)


def _filled(row: Row, gaps: Iterable[int]) -> Row:
    values = list(row)
    for index in gaps:
        values[index] = math.nan
    return tuple(values)


def _step(row: Row, candidates: tuple[Candidate, ...], stages: tuple[Stage, ...]) -> Step:
    node, parent, step, position, token_id, text, bytes_hex, delta_text, forced, rank, *measured = row
    logprob, prob, prob_final, entropy, margin = measured[:5]
    kv, timing, memory = Kv(*measured[5:8]), Timing(*measured[8:11]), Memory(*measured[11:])
    return Step(
        step, position, token_id, bytes_hex, text, delta_text, node, parent, rank, logprob, prob, prob_final,
        entropy, margin, candidates, stages, kv, timing, memory, bool(forced),
    )  # fmt: skip
