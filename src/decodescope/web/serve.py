"""Serve: a session's model behind HTTP, from the first connection to the last."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from decodescope.monitor.metrics import Metrics
from decodescope.serving.engine import Engine
from decodescope.serving.orders import Plan
from decodescope.web.address import Listening
from decodescope.web.app import create_app
from decodescope.web.guard import Access
from decodescope.web.served import Served
from decodescope.web.server import Server

if TYPE_CHECKING:
    from decodescope.serving.archive import Archive
    from decodescope.session import Session


def serve(
    session: "Session",
    listening: Listening,
    plan: Plan,
    guards: tuple[str, ...],
    archive: "Archive | None",
    tell: Callable[[], None],
) -> None:
    """Serve until told to stop; `tell` is called when clients are heard. What runs then ends as interrupted."""
    served = make_served(session, plan, guards, archive)
    access = Access(listening.token, listening.port, listening.hosts)
    server = Server(create_app(served, access), tell, served.engine.close)
    served.engine.start()
    try:
        server.run(sockets=[listening.socket])
    finally:
        served.engine.close()


def make_served(session: "Session", plan: Plan, guards: tuple[str, ...], archive: "Archive | None") -> Served:
    """An engine that has not started, with the metrics that watch it."""
    metrics = Metrics(session.files.name, lambda: engine.gauges())
    engine = Engine(session, plan, [metrics], archive)
    return Served(engine, metrics, guards)
