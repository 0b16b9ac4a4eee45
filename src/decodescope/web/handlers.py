"""Every fault becomes one answer in OpenAI's shape, whoever raised it."""

import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from decodescope.errors import DecodescopeError
from decodescope.visible import visible
from decodescope.web.faults import fault_answer, refusal
from decodescope.web.openai_requests import ChatMessage, Neutral, NeutralMessage, StreamOptions, TextPart

_SHOWN = 80  # characters of a name that a client made up
_OURS = {404: "web.no_path", 405: "web.method"}
# What the JSON parser raises where a body is no mere mistake.
_UNREADABLE: dict[type, str] = {RecursionError: "web.too_deep", ValueError: "web.long_number"}
_NEUTRAL = {*Neutral.model_fields, *NeutralMessage.model_fields}
_INNER: Set[object] = {name for model in (ChatMessage, TextPart, StreamOptions) for name in model.model_fields}
# Pydantic's names of what can be wrong, and our sentences.
_WRONG = {
    "missing": "web.field.missing", "string_type": "web.field.text", "int_type": "web.field.whole_number",
    "float_type": "web.field.number", "bool_type": "web.field.boolean", "list_type": "web.field.list",
    "model_type": "web.field.object", "model_attributes_type": "web.field.object",
    "string_too_short": "web.field.empty", "too_short": "web.field.empty", "too_long": "web.field.too_long",
    "greater_than_equal": "web.field.at_least", "less_than_equal": "web.field.at_most",
    "less_than": "web.field.below", "literal_error": "web.field.one_of", "string_unicode": "web.field.unicode",
    "needs_logprobs": "web.field.needs_logprobs",
}  # fmt: skip


def add_handlers(app: FastAPI, refused: Callable[[str], None]) -> None:
    """Install them; `refused` is told of requests that were no requests."""

    async def invalid(_: Request, fault: Exception) -> Response:
        assert isinstance(fault, RequestValidationError)
        refused("invalid")
        return _invalid(fault)

    async def http(_: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        if fault.status_code == 400:  # the body could not be read as JSON
            refused("invalid")
        unreadable = _UNREADABLE.get(type(fault.__cause__), "web.not_json")
        key = _OURS.get(fault.status_code, unreadable)
        return refusal(fault.status_code, key, headers=fault.headers, digits=sys.get_int_max_str_digits())

    async def known(_: Request, fault: Exception) -> Response:
        assert isinstance(fault, DecodescopeError)
        return fault_answer(fault)

    async def unknown(_: Request, fault: Exception) -> Response:
        return refusal(500, "web.failed")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(DecodescopeError, known)
    app.add_exception_handler(Exception, unknown)


def _invalid(fault: RequestValidationError) -> Response:
    """The most telling of the faults: an unknown field by its name, else the deepest one."""
    faults = fault.errors()
    unknown = next((each for each in faults if each["type"] == "extra_forbidden"), None)
    # Of several forms the one that it came closest to.
    first = unknown or max(faults, key=lambda each: (len(each["loc"]), not _is_form(each["type"])))
    place = first["loc"]
    if len(place) < 2 or first["type"] == "json_invalid":
        return refusal(400, "web.not_json")
    neutral = (place[: at + 1] for at, part in enumerate(place) if part in _NEUTRAL)
    if unsupported := next(neutral, place if unknown else None):
        name = _named(unsupported, _INNER | {unsupported[-1]})
        return refusal(400, "web.unsupported", param=name, name=name)
    name = _named(place, _INNER)
    forms = {each["type"] for each in faults if _named(each["loc"], _INNER) == name}
    vague = len(forms) > 1 and _is_form(first["type"])
    key = "web.field.form" if vague else _WRONG.get(first["type"], "web.field.form")
    return refusal(400, key, param=name, **{**_limits(first), "name": name})


def _limits(fault: dict[str, Any]) -> dict[str, Any]:
    """What the sentence names; several words are joined without English."""
    return {name: str(value).replace(" or ", ", ") for name, value in fault.get("ctx", {}).items()}


def _is_form(kind: str) -> bool:
    return kind.endswith("_type")


def _named(place: Sequence[object], inner: Set[object]) -> str:
    """`messages[1].content`: without where it stands, and without the forms that pydantic names in between."""
    name = "".join(map(str, place[1:2]))
    for part in place[2:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part in inner:
            name += f".{part}"
    return visible(name)[:_SHOWN]
