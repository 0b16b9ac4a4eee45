"""An engine on a tiny model, clients that wait, and a watcher that remembers."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from decodescope.options import RunOptions
from decodescope.serving.engine import Engine
from decodescope.serving.orders import Order, Ticket
from decodescope.session import Session
from decodescope.trace.records import End, Step, Trace


@dataclass
class Client:
    """What one client gets; `wait` for its end."""

    steps: list[Step] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    ticket: Ticket | None = None
    first: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, what: Step | End) -> None:
        if isinstance(what, End):
            self.ends.append(what)
            self.over.set()
        else:
            self.steps.append(what)
        self.first.set()

    def wait(self) -> End:
        assert self.over.wait(60), "no end came"
        (end,) = self.ends
        return end

    @property
    def ids(self) -> list[int]:
        return [step.token_id for step in self.steps]


@dataclass
class Diary:
    """A watcher that writes everything down."""

    joins: list[tuple[str, int, int, float]] = field(default_factory=list)
    steps: list[tuple[str, Step, float]] = field(default_factory=list)
    ends: list[tuple[str, Trace, float, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def joined(self, run_id: str, prompt_tokens: int, reused_tokens: int, waited_s: float) -> None:
        self.joins.append((run_id, prompt_tokens, reused_tokens, waited_s))

    def stepped(self, run_id: str, step: Step, seconds: float) -> None:
        self.steps.append((run_id, step, seconds))

    def ended(self, run_id: str, trace: Trace, seconds: float, reason: str) -> None:
        self.ends.append((run_id, trace, seconds, reason))

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


def order(session: Session, text: str, tokens: int = 8, **options) -> Order:
    given = {"ignore_eos": True, "candidates": 3, **options}
    return Order(session.prompt(text), RunOptions(max_new_tokens=tokens, **given))


def ask(engine: Engine, *orders: Order) -> list[Client]:
    """Clients whose orders are in the queue."""
    clients = [Client() for _ in orders]
    for client, each in zip(clients, orders, strict=True):
        client.ticket = engine.submit(each, client)
    return clients


def answers(engine: Engine, orders: Sequence[Order]) -> list[list[int]]:
    """The tokens of orders sent together."""
    clients = ask(engine, *orders)
    for client in clients:
        client.wait()
    return [client.ids for client in clients]
