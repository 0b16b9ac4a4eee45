"""Bodies of requests, read whole and within limits: how many bytes, and how long they may take."""

import asyncio
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope

from decodescope.web.faults import refusal


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of the server at most, before the engine's own limits."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # until a body is there
    requests: int = 200  # at the same time, streams included


class BodyFault(Exception):
    """A body that is not read to its end; `answer` says why."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status_code)
        self.answer = answer


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The whole body, whether its length was announced or it comes in chunks. Raises BodyFault."""
    announced = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"0")
    if not announced.isdigit() or len(announced) > 18 or int(announced) > limits.body_bytes:
        raise _too_large(limits)
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BodyFault(Response(status_code=400))  # nobody reads it
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        closing = {"Connection": "close"}
        raise BodyFault(refusal(408, "web.slow_body", headers=closing, seconds=limits.body_seconds)) from None
    return b"".join(parts)


def _too_large(limits: Limits) -> BodyFault:
    return BodyFault(refusal(413, "web.body_too_large", headers={"Connection": "close"}, bytes=limits.body_bytes))
