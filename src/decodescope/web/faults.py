"""What a client is told when something is wrong: OpenAI's error shape, one clear sentence, never a traceback."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from decodescope.errors import DecodescopeError, InputError
from decodescope.locale import translate as t
from decodescope.serving.orders import Busy
from decodescope.trace.lines import json_text

# What OpenAI's clients call the kinds of faults; 4xx that are none of these are `invalid_request_error`.
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip
_NOT_FOUND = ("serve.no_run", "web.no_model")


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
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    **values: object,
) -> JsonAnswer:
    """The answer that says sentence `error.{key}`; the key's last part is its code."""
    message = t(f"error.{key}", **values)
    return JsonAnswer(error_body(status, message, param, key.rpartition(".")[2]), status, headers)


def fault_answer(fault: DecodescopeError) -> JsonAnswer:
    """The answer to a request that raised a fault: the client's own, a full queue, or ours."""
    code, retry = fault.key, None
    if isinstance(fault, Busy):
        status, retry = 429, {"Retry-After": "1"}
    elif isinstance(fault, InputError):
        status = 404 if fault.key in _NOT_FOUND else 400
    else:
        status = 500
    room, _, name = fault.key.rpartition(".")
    param = name if room == "sampling" else None
    return JsonAnswer(error_body(status, str(fault), param, code), status, retry)


def failure(message: str | None) -> JsonAnswer:
    """The answer to a request whose run failed: the trace's own sentence."""
    return JsonAnswer(error_body(500, message or t("error.web.failed"), code="failed"), 500)
