"""A session served for real: an engine, and HTTP on a loopback port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2
import openai
from openai import Stream
from openai.types import Completion
from waiting import until

from decodescope.session import Session
from decodescope.web.address import listen
from decodescope.web.app import create_app
from decodescope.web.bodies import Limits
from decodescope.web.guard import Access
from decodescope.web.serve import Service, limits_of, make_served
from decodescope.web.served import Served
from decodescope.web.server import Server, most_connections

TOKEN = "t0ken-of-the-tests"


@dataclass(frozen=True)
class Live:
    """A server that runs, seen from outside and from inside."""

    url: str
    served: Served
    clients: list[httpx2.Client] = field(default_factory=list)

    def http(self, **more: object) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60, verify=False, **more
        )

    def openai(self) -> openai.OpenAI:
        plain = openai.DefaultHttpxClient(verify=False)  # reading certificates takes longer than most requests
        self.clients.append(plain)
        return openai.OpenAI(base_url=f"{self.url}v1", api_key=TOKEN, max_retries=0, timeout=60, http_client=plain)

    @contextmanager
    def streaming(self) -> Iterator[Stream[Completion]]:
        """A client that has a place and keeps it."""
        with self.openai().completions.create(
            model=self.served.model_name,
            prompt="x",
            max_tokens=60_000,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream:
            next(iter(stream))
            yield stream

    def gauge(self, name: str) -> float:
        return self.served.engine.gauges()[name]

    def wait_idle(self) -> None:
        """Until no request holds a place."""
        until(lambda: not self.gauge("requests_running") and not self.gauge("requests_waiting"))


@contextmanager
def serving(session: Session, service: Service, limits: Limits | None = None) -> Iterator[Live]:
    """Serve in a thread of this process."""
    listening = listen("127.0.0.1", 0, TOKEN, ())
    # The system holds little for a reader that does not read.
    listening.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    served, heard = make_served(session, service), threading.Event()
    access = Access(listening.token, listening.port, listening.hosts, limits or limits_of(service.plan))
    connections = most_connections(access.limits.requests)
    server = Server(create_app(served, access), heard.set, served.engine.close, connections)
    served.engine.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.socket]})
    thread.start()
    try:
        assert heard.wait(60)
        live = Live(listening.url, served)
        yield live
        for client in live.clients:
            client.close()
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
