"""The HTTP server around the application: starts, says where, and stops cleanly."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.types import ASGIApp

_PATIENCE_S = 5  # for answers that are still being read when the server stops
_CONNECTIONS = 1024
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


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        access_log=False,  # addresses may hold the token
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        http="h11",
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_PATIENCE_S,
    )
