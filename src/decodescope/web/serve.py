"""Serve: a session's model behind HTTP, from the first connection to the last."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodescope.monitor.metrics import Metrics
from decodescope.serving.engine import Engine
from decodescope.serving.orders import Plan
from decodescope.serving.watcher import Watcher
from decodescope.web.address import Listening
from decodescope.web.app import create_app
from decodescope.web.bodies import Limits
from decodescope.web.guard import Access
from decodescope.web.served import Served
from decodescope.web.server import Server, most_connections

if TYPE_CHECKING:
    from decodescope.monitor.telemetry import Telemetry
    from decodescope.serving.archive import Archive
    from decodescope.session import Session

_BESIDES = (
    128  # open requests besides those that run or wait: readers of runs, and those to be told that it is full
)


@dataclass(frozen=True, slots=True)
class Service:
    """How to serve: within which limits, what is recorded where, the guards of requests that bring none, and who
    is told of requests besides the metrics."""

    plan: Plan
    archive: "Archive | None" = None
    guards: tuple[str, ...] = ()
    telemetry: "Telemetry | None" = None


def serve(session: "Session", listening: Listening, service: Service, tell: Callable[[], None]) -> None:
    """Serve until told to stop; `tell` is called when clients are heard. What runs then ends as interrupted."""
    served = make_served(session, service)
    access = Access(listening.token, listening.port, listening.hosts, limits_of(service.plan))
    connections = most_connections(access.limits.requests)
    server = Server(create_app(served, access), tell, served.engine.close, connections)
    served.engine.start()
    try:
        server.run(sockets=[listening.socket])
    finally:
        served.engine.close()
        if service.telemetry is not None:
            service.telemetry.close()


def limits_of(plan: Plan) -> Limits:
    """As many open requests as may run and wait, and some more."""
    return Limits(requests=plan.most + _BESIDES)


def make_served(session: "Session", service: Service) -> Served:
    """An engine that has not started, with the metrics that watch it."""
    metrics = Metrics(session.files.name, lambda: engine.gauges())
    watchers: list[Watcher] = [metrics, *filter(None, [service.telemetry])]
    engine = Engine(session, service.plan, watchers, service.archive)
    return Served(engine, metrics, service.guards)
