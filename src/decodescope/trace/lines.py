"""Records as JSON: one object a line, the fields' names as keys, nothing lost on the way there and back."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from decodescope.trace.records import Branch, End, Run, Step

Record = Run | Step | End | Branch
TYPES: dict[str, type[Record]] = {"run": Run, "step": Step, "end": End, "branch": Branch}
NONFINITE = ("NaN", "Infinity", "-Infinity")
# What would act on a terminal (C1 controls, bidi, line separators) or cannot be UTF-8 (lone surrogates).
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def record_line(record: Record) -> dict[str, Any]:
    """The record as a JSON object: `type` (run, step, end or branch) first, then its fields in their order.

    Tuples become lists. JSON has no NaN or infinities: as measured numbers they are the strings in
    `NONFINITE`, so that null keeps meaning "unavailable". Settings hold finite numbers only.
    """
    return {"type": type(record).__name__.lower(), **_encode(record)}


def document_text(record: Any) -> str:
    """A frozen record as one JSON document: as in `record_line`, without a type."""
    return json_text(_encode(record))


def json_text(line: dict[str, Any]) -> str:
    """One line of UTF-8 JSON without its line end.

    Readable characters stay readable; those a terminal would act on are written as escapes. Raises
    ValueError for a setting that is not a finite number.
    """
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def _reading(record: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(field.name for field in fields(record))
    return names, attrgetter(*names)


def _encode(value: Any) -> Any:
    kind: Any = type(value)
    if kind is float:
        return value if math.isfinite(value) else _name(value)
    if kind is int or kind is str or value is None or kind is bool or kind is dict:
        return value
    if kind is tuple:
        return [_encode(item) for item in value]
    names, read = _reading(kind)
    return dict(zip(names, map(_encode, read(value)), strict=True))


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
