"""The tables of a run as the code sees them: columns, what each may hold, what of a record each keeps."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from decodescope.trace.records import Action, FinishReason

Row = tuple[Any, ...]
MISSING = type(None)


class Column(NamedTuple):
    """A column; `field` is the attribute of the record that it keeps (`kv.tokens`: of an inner record)."""

    name: str
    kind: str
    field: str


@dataclass(frozen=True)
class Table:
    """A table's columns as `name:kind` words, or `name:kind=field` where the record says it otherwise.

    The first `key` columns order the rows and are unique; the first `given` ones are of no record. Formats
    older than `since` have no such table.
    """

    name: str
    spec: str
    key: int = 1
    given: int = 1
    since: int = 1

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """All columns in the order of `spec`."""
        return tuple(map(_column, self.spec.split()))

    @cached_property
    def insert(self) -> str:
        """The INSERT statement, a placeholder for every column."""
        marks = ", ".join("?" * len(self.columns))
        return f"INSERT INTO {self.name} ({_names(self.columns)}) VALUES ({marks})"

    @cached_property
    def select(self) -> str:
        """The SELECT statement for all rows in key order."""
        return f"SELECT {_names(self.columns)} FROM {self.name} ORDER BY {_names(self.columns[: self.key])}"

    @cached_property
    def select_from(self) -> str:
        """The same for the rows whose first column is not below a given value."""
        rows, order = self.select.split(" ORDER BY ")
        return f"{rows} WHERE {self.columns[0].name} >= ? ORDER BY {order}"

    @cached_property
    def kept(self) -> Callable[[Any], Row]:
        """What a row keeps of a record: all columns after the `given` ones."""
        return attrgetter(*(column.field for column in self.columns[self.given :]))

    def fields(self, row: Row) -> dict[str, Any]:
        """The record's fields from a row, those of an inner record as a dictionary of their own."""
        found: dict[str, Any] = {}
        for column, value in zip(self.columns[self.given :], row[self.given :], strict=True):
            outer, _, inner = column.field.partition(".")
            if inner:
                found.setdefault(outer, {})[inner] = value
            else:
                found[outer] = value
        return found


def _column(word: str) -> Column:
    name, _, rest = word.partition(":")
    kind, _, field = rest.partition("=")
    return Column(name, kind, field or name)


def _names(columns: tuple[Column, ...]) -> str:
    return ", ".join(column.name for column in columns)


class Kind(NamedTuple):
    """What a column may hold in a sound file, and how it is read: ValueError for what makes no sense."""

    types: tuple[type, ...]
    read: Callable[[Any], Any] | None = None


def _hex(text: str) -> str:
    bytes.fromhex(text)
    return text


def _one_of(words: Any) -> Callable[[str], str]:
    """A word of a Literal type."""

    def read(text: str) -> str:
        if text not in get_args(words):
            raise ValueError(text)
        return text

    return read


def _object(text: str) -> dict[str, Any]:
    settings = json.loads(text)
    json.dumps(settings, allow_nan=False)
    if not isinstance(settings, dict):
        raise ValueError(text)
    return settings


def _shape(text: str) -> tuple[int, ...]:
    sizes = json.loads(text)
    if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
        raise ValueError(text)
    return tuple(sizes)


def _measurement(value: float | None) -> float:
    """NaN is kept as NULL, so that SQL's averages skip it."""
    return math.nan if value is None else value


KINDS = {
    "int": Kind((int,)),
    "int?": Kind((int, MISSING)),
    "text": Kind((str,)),
    "text?": Kind((str, MISSING)),
    "real": Kind((float, MISSING), _measurement),
    "real?": Kind((float, MISSING)),
    "any": Kind((int, float, str, MISSING)),
    "flag": Kind((int,), bool),
    "hex": Kind((str,), _hex),
    "reason": Kind((str,), _one_of(FinishReason)),
    "action": Kind((str,), _one_of(Action)),
    "object": Kind((str,), _object),
    "shape": Kind((str,), _shape),
}

RUN = Table(
    "run",
    "id:int model:text source:text path:text revision:text? sha256:text? architecture:text dtype:text"
    " device:text attention:text use_cache:flag prompt_text:text max_new_tokens:int kv_bytes_per_token:int"
    " vocabulary:int started_at:text",
)
KV_CACHE = Table("kv_cache", "id:int dtype:text", since=4)
MATRICES = Table("matrices", "id:int form:text", since=4)
SETTING = Table("setting", "ordinal:int value_type:text name:text value:any origin:text", given=2)
STOP = Table("stop", "ordinal:int token_id:int? string:text?")
VERSION = Table("version", "ordinal:int name:text version:text")
NOTE = Table("note", "ordinal:int text:text")
PROMPT_TOKEN = Table(
    "prompt_token",
    "ordinal:int position:int token_id:int text:text bytes_hex:hex role:text injected:flag partial:flag",
)
NODE = Table(
    "node",
    "id:int=node parent_id:int?=parent step:int position:int token_id:int text:text bytes_hex:hex"
    " delta_text:text forced:flag rank:int"
    " logprob_nats:real prob:real prob_final:real entropy_nats:real margin_logits:real"
    " kv_tokens:int=kv.tokens kv_used_bytes:int=kv.used_bytes kv_allocated_bytes:int=kv.allocated_bytes"
    " forward_s:real=timing.forward_s sample_s:real=timing.sample_s total_s:real=timing.total_s"
    " rss_bytes:int=memory.rss_bytes device_bytes:int?=memory.device_bytes",
    given=0,
)
CANDIDATE = Table(
    "candidate",
    "node_id:int ordinal:int rank:int token_id:int text:text bytes_hex:hex"
    " logit:real prob_raw:real prob_final:real removed_by:text?",
    key=2,
    given=2,
)
FILTER = Table("sampler_filter", "id:int name:text settings:object")
STAGE = Table(
    "stage",
    "node_id:int ordinal:int filter_id:int survivors:int kept_mass:real entropy_nats:real",
    key=2,
    given=3,
)
SITE = Table(
    "site",
    "id:int node_id:int step:int layer:int? site:text shape:shape dtype:text elements:int=count mean:real std:real"
    " min:real max:real l2:real sum:real signature:real zeros:real nonfinite:int recomputed:flag",
    given=2,
    since=2,
)
TENSOR = Table("tensor", "block:int name:text node_id:int? dtype:text shape:shape bytes:int", key=2)
ENDING = Table(
    "ending",
    "id:int finish_reason:reason stop_token_id:int? text:text prompt_tokens:int new_tokens:int ttft_s:real?"
    " decode_tokens_per_s:real? peak_rss_bytes:int? error:text? stop_string:text? node_id:int?=node",
)
DRAW = Table("draw", "node_id:int mass_above:real", since=3)
STAGE_PROB = Table("stage_prob", "node_id:int stage:int candidate:int prob:real", key=3, given=3, since=3)
INTERVENTION = Table(
    "intervention",
    "node_id:int ordinal:int guard:text action:action measured:real threshold:real temperature:real?",
    key=2,
    given=2,
    since=3,
)
_BRANCH_END = " ".join(f"{name}:{kind}=end.{field}" for name, kind, field in ENDING.columns[1:])
BRANCH = Table("branch", f"id:int next_node_id:int step:int started_at:text {_BRANCH_END}", given=2, since=3)
BRANCH_SETTING = Table(
    "branch_setting",
    "branch_id:int ordinal:int value_type:text name:text value:any origin:text",
    key=2,
    given=3,
    since=3,
)
REOPENED = Table("reopened", "id:int started_at:text next_node_id:int", since=3)
