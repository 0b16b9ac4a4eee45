"""What a client is told when something is wrong: OpenAI's error shape, one clear sentence, never a traceback."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from decodescope.errors import DecodescopeError, InputError
from decodescope.locale import translate as t
from decodescope.serving.orders import Busy
from decodescope.trace.lines import json_text

_log = logging.getLogger(__name__)
# What OpenAI's clients call the kinds of faults; 4xx that are none of these are `invalid_request_error`.
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip
_NOT_FOUND = ("serve.no_run", "web.no_model")
# By the key of a sentence, or by its room: a word for programs, and the field that is meant.
_CODES = {
    "run.prompt_too_long": "context_length_exceeded", "run.text_too_long": "context_length_exceeded",
    "web.no_model": "model_not_found",
    "sampling": "invalid_value", "guard": "invalid_value", "web.field": "invalid_value",
}  # fmt: skip
_PARAMS = {"web.no_model": "model", "guard": "guards"}
_SHOWN = 80  # characters of a value that a client made up


class JsonAnswer(JSONResponse):
    """One JSON object; characters that a terminal would act on are written as escapes."""

    def render(self, content: Any) -> bytes:
        """UTF-8 JSON. Raises ValueError for numbers that are not finite."""
        return json_text(content).encode()


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error: `{"error": {"message", "type", "param", "code"}}`."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    status: int,
    key: str,
    /,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    **values: object,
) -> JsonAnswer:
    """The answer that says sentence `error.{key}`, long values cut; its code is OpenAI's, or the key's end."""
    room, _, name = key.rpartition(".")
    code = _CODES.get(key) or _CODES.get(room, name)
    message = t(f"error.{key}", **{name: _cut(value) for name, value in values.items()})
    return JsonAnswer(error_body(status, message, param, code), status, headers)


def fault_answer(fault: DecodescopeError) -> JsonAnswer:
    """The answer to a request that raised a fault: the client's own, a full queue, or ours."""
    room, _, name = fault.key.rpartition(".")
    if room == "trace":  # names folders of this machine
        _log.error("%s", fault)
        return refusal(500, "web.unreadable")
    status, retry = 500, None
    if isinstance(fault, Busy):
        status, retry = 429, {"Retry-After": "1"}
    elif isinstance(fault, InputError):
        status = 404 if fault.key in _NOT_FOUND else 400
    field = str(fault.values.get("name", name)) if room == "sampling" else None
    param = field or _PARAMS.get(fault.key) or _PARAMS.get(room)
    return refusal(status, fault.key, param, retry, **fault.values)


def failure(message: str | None) -> JsonAnswer:
    """The answer to a request whose run failed: the trace's own sentence."""
    return JsonAnswer(error_body(500, message or t("error.web.failed"), code="failed"), 500)


def _cut(value: object) -> object:
    text = str(value)
    return value if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
