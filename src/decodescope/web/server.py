"""The HTTP server around the application: starts, says where, waits for nobody for ever, and stops cleanly."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_AT_ONCE = 16  # connections taken in one turn of the event loop: they are counted some turns later
_QUEUE = 2048  # connections that the system holds until their turn
_PATIENCE_S = 5  # for answers that are still being read when the server stops
HEAD_S = 10.0  # that a connection may take until the head of its next request is there
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def most_connections(requests: int) -> int:
    """How many connections are kept where so many requests may be open: twice as many, but no more than half of
    the files that this process may have open now.
    """
    if sys.platform == "win32":
        return 2 * requests
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * requests if soft == resource.RLIM_INFINITY else min(2 * requests, soft // 2)


class Server(uvicorn.Server):
    """Runs until Ctrl-C, SIGTERM or `stop`; a second Ctrl-C waits for nobody.

    `started_up` is called when clients are heard. `stopping` is called, outside the event loop, when no more are:
    it ends what is running, so that clients get the end of their streams. There are `connections` at most.
    """

    def __init__(
        self, app: ASGIApp, started_up: Callable[[], None], stopping: Callable[[], None], connections: int
    ) -> None:
        super().__init__(_config(app, connections))
        self._started_up, self._stopping = started_up, stopping

    def stop(self) -> None:
        """Stop soon; from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_QUEUE)
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


class _Config(uvicorn.Config):
    connections: int  # at most


class _Connection(H11Protocol):
    """Closes itself where no request comes: whoever has no token could otherwise hold all there are.

    Where there are too many, the one makes way that has been idle longest, those first that never asked for
    anything; the new one only where all are being answered.
    """

    config: _Config
    _idle_since = 0.0  # by the clock of the event loop
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        self._make_room()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _make_room(self) -> None:
        known = [each for each in self.connections if isinstance(each, _Connection)]
        there = [each for each in known if not each.transport.is_closing()]
        if len(there) > self.config.connections:
            idle = [each for each in there if each._is_idle and each is not self]
            min(idle, key=lambda each: (each.cycle is not None, each._idle_since), default=self).transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._wait_no_more()
        self._idle_since = self.loop.time()
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _give_up(self) -> None:
        if self._is_idle:
            self.transport.close()


def _config(app: ASGIApp, connections: int) -> _Config:
    config = _Config(
        app,
        access_log=False,  # addresses may hold the token
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=_Connection,
        lifespan="off",
        backlog=_AT_ONCE,
        timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=_PATIENCE_S,
    )
    config.connections = connections
    return config
