"""Records as JSON: one object a line, the fields' names as keys, nothing lost on the way there and back."""

import json
import math
import re
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from decodescope.errors import InputError
from decodescope.trace.records import End, Run, Step

Record = Run | Step | End
TYPES: dict[str, type[Record]] = {"run": Run, "step": Step, "end": End}
NONFINITE = ("NaN", "Infinity", "-Infinity")
# What would act on a terminal (C1 controls, bidi, line separators) or cannot be UTF-8 (lone surrogates).
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def record_line(record: Record) -> dict[str, Any]:
    """The record as a JSON object: `type` (run, step or end) first, then its fields in their order.

    Tuples become lists. JSON has no NaN or infinities: as measured numbers they are the strings in
    `NONFINITE`, so that null keeps meaning "unavailable". Settings hold finite numbers only.
    """
    return {"type": type(record).__name__.lower(), **_encode(record)}


def record_from(line: dict[str, Any]) -> Record:
    """The record that `record_line` made into `line`; InputError names what does not fit."""
    record: Any = TYPES.get(str(line.get("type"))) if isinstance(line, dict) else None
    if record is None:
        raise InputError("trace.line", what="type", value=_short(line))
    values = {name: value for name, value in line.items() if name != "type"}
    result: Record = _decoder(record)(values, str(line["type"]))
    return result


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


Decoder = Callable[[Any, str], Any]


@cache
def _decoder(hint: Any) -> Decoder:
    """A function (value, place) -> the value as `hint` wants it, raising InputError that names the place."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record_decoder(hint)
    if origin in (types.UnionType, Union):
        return _union_decoder(arguments)
    if origin is tuple:
        return _list_decoder(_decoder(arguments[0]))
    if origin is dict:
        return _dict_decoder(arguments[1])
    if origin is Literal:
        return _checked(lambda value: value in arguments)
    if hint is float:
        return _float
    return _checked(lambda value: type(value) is hint)


def _checked(fits: Callable[[Any], bool]) -> Decoder:
    def decode(value: Any, place: str) -> Any:
        if fits(value):
            return value
        raise InputError("trace.line", what=place, value=_short(value))

    return decode


def _float(value: Any, place: str) -> float:
    if type(value) in (int, float) or (isinstance(value, str) and value in NONFINITE):
        with suppress(OverflowError):
            return float(value)
    raise InputError("trace.line", what=place, value=_short(value))


def _record_decoder(record: Any) -> Decoder:
    hints = get_type_hints(record)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields(record)}

    def decode(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise InputError("trace.line", what=place, value=_short(value))
        for key in value.keys() ^ decoders.keys():
            raise InputError("trace.line_key", what=f"{place}.{key}")
        return record(**{name: decoder(value[name], f"{place}.{name}") for name, decoder in decoders.items()})

    return decode


def _union_decoder(hints: tuple[Any, ...]) -> Decoder:
    if float in hints and str not in hints:
        exact = [hint for hint in hints if hint is not float]
        return lambda value, place: value if type(value) in exact else _float(value, place)
    return _checked(lambda value: type(value) in hints)


def _list_decoder(item: Decoder) -> Decoder:
    def decode(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise InputError("trace.line", what=place, value=_short(value))
        return tuple(item(each, f"{place}[{index}]") for index, each in enumerate(value))

    return decode


def _dict_decoder(hint: Any) -> Decoder:
    def fits(value: Any) -> bool:
        return isinstance(value, dict) and (hint is Any or all(type(each) is hint for each in value.values()))

    return _checked(fits)


def _short(value: Any) -> str:
    return repr(value)[:60]
