"""Server-sent events: a stream that notices at once when its reader has gone, and waits for no reader for ever."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": still here\n\n"
PING_S = 15.0  # without an event: proxies close what is silent for long
WRITE_S = 60.0  # that a reader may take nothing at all
_HEADERS = {"X-Accel-Buffering": "no"}  # to a proxy in front: pass each event on at once


def event(data: str, number: int | None = None) -> bytes:
    """One event; `number` is what a reader sends as `Last-Event-ID` to go on behind it. `data` is one line."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}data: {data}\n\n".encode()


class EventStream(Response):
    """Sends what `events` yields; `closed` is called however it ends, before anything else happens."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], None] | None = None) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._closed = events, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._closed:
                self._closed()
            for task in (pump, gone):
                task.cancel()
            await asyncio.wait((pump, gone))
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(TimeoutError):
            async for part in self._events:
                async with asyncio.timeout(WRITE_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            async with asyncio.timeout(WRITE_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; the whole body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
