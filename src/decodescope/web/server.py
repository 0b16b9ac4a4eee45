"""The HTTP server around the application: starts, says where, waits for nobody for ever, and stops cleanly."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_PATIENCE_S = 5  # for answers that are still being read when the server stops
HEAD_S = 10.0  # that a connection may take until the head of its next request is there
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Runs until Ctrl-C, SIGTERM or `stop`; a second Ctrl-C waits for nobody.

    `started_up` is called when clients are heard. `stopping` is called, outside the event loop, when no more are:
    it ends what is running, so that clients get the end of their streams.
    """

    def __init__(self, app: ASGIApp, started_up: Callable[[], None], stopping: Callable[[], None]) -> None:
        super().__init__(_config(app))
        self._started_up, self._stopping = started_up, stopping

    def stop(self) -> None:
        """Stop soon; from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._started_up()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """End what runs, then let the connections close."""
        for server in self.servers:
            server.close()
        await asyncio.to_thread(self._stopping)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn raises the signal again in the end; but a server that stops when told to has not failed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Connection(H11Protocol):
    """Closes itself where no request comes: whoever has no token could otherwise hold all there are."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait_for_head(self) -> None:
        self._wait_no_more()
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        access_log=False,  # addresses may hold the token
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=_Connection,
        lifespan="off",
        timeout_graceful_shutdown=_PATIENCE_S,
    )
