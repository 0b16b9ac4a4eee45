"""Every fault becomes one answer in OpenAI's shape, whoever raised it."""

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from decodescope.errors import DecodescopeError
from decodescope.visible import visible
from decodescope.web.faults import fault_answer, refusal

_SHOWN = 80  # characters of a name that a client made up
_OURS = {404: "web.no_path", 405: "web.method"}


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
        key = _OURS.get(fault.status_code, "web.not_json")
        return refusal(fault.status_code, key, headers=fault.headers)

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
    if unknown is not None:
        name = _shown(unknown["loc"][-1])
        return refusal(400, "web.unsupported", param=name, name=name)
    first = max(faults, key=lambda each: len(each["loc"]))  # of several forms the one that it came closest to
    place = first["loc"][1:]
    if not place or first["type"] == "json_invalid":
        return refusal(400, "web.not_json")
    name = _shown(place[0])
    return refusal(400, "web.field", param=name, name=name, reason=_shown(first["msg"]))


def _shown(text: object) -> str:
    return visible(str(text))[:_SHOWN]
