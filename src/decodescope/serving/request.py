"""Request: one order on its way through the engine."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from decodescope.errors import DecodescopeError, FindingError, ResourceError
from decodescope.live import LiveRun
from decodescope.serving.archive import Archive, new_run_id
from decodescope.serving.orders import Deliver, Order, Ticket
from decodescope.serving.watcher import Watcher
from decodescope.trace.records import End, FinishReason, Step, Trace

_log = logging.getLogger(__name__)


class Request:
    """Waits, then runs: `live` is its run once it has joined. It tells its client and the watchers."""

    def __init__(
        self, order: Order, deliver: Deliver, watchers: Sequence[Watcher] = (), archive: Archive | None = None
    ) -> None:
        self.order, self.ticket = order, Ticket(new_run_id(), len(order.prompt.tokens))
        self._deliver, self._watchers, self._archive = deliver, watchers, archive
        self._came_at = self._told_at = time.perf_counter()
        self.live: LiveRun | None = None
        self.cache_bytes = 0  # promised to it
        self.reads = True  # its prompt has not been read to the end
        self.over = False

    @property
    def run_id(self) -> str:
        """The name of its run."""
        return self.ticket.run_id

    @property
    def trace(self) -> Trace | None:
        """Its run so far; None before it joins."""
        return self.live.traces[0] if self.live else None

    def join(self, live: LiveRun) -> None:
        """Leave the queue."""
        self.live, self.ticket.reused_tokens = live, live.reused_tokens
        waited_s = time.perf_counter() - self._came_at
        self._record(lambda archive: archive.begin(self.run_id, live.traces[0].run))
        self._watch(lambda each: each.joined(self.run_id, self.ticket.prompt_tokens, live.reused_tokens, waited_s))

    @property
    def unread_tokens(self) -> int:
        """How many tokens of its prompt have not been computed."""
        assert self.live is not None
        first, end = self.live.decoding.next_pass()
        return end - first

    def read(self) -> None:
        """Read one chunk of the prompt; with the last one comes the first token."""
        assert self.live is not None
        if not self.live.read_chunk():
            self.reads = False
            self.step()

    def step(self, forward_s: float | None = None) -> None:
        """Choose, record and deliver the next token; `forward_s` as in `LiveRun.turn`."""
        assert self.live is not None
        for _, step in self.live.turn(forward_s):
            self._tell(step)
        self.end()

    def guarded(self, work: Callable[[], None]) -> None:
        """Do some work for this request alone; what fails ends it and no other."""
        try:
            work()
        except Exception as fault:
            self.fail(fault)

    def fail(self, fault: Exception) -> None:
        """End by a fault; what is no fault of the client's or the machine's is logged."""
        if not isinstance(fault, DecodescopeError):
            _log.error("run %s failed", self.run_id, exc_info=fault)
        known = fault if isinstance(fault, DecodescopeError) else ResourceError("serve.failed")
        if self.live is None:
            self.abandon("failed", known)
            return
        self.live.finish("error", known)
        nonfinite = isinstance(fault, FindingError) and fault.key == "run.nonfinite"
        self.end("nonfinite" if nonfinite else None)

    def abandon(self, reason: str = "abandoned", fault: DecodescopeError | None = None) -> None:
        """End without ever having joined. A second call does nothing."""
        if self.over:
            return
        self.over = True
        self._record(lambda archive: archive.settle(self.run_id, None))
        self._watch(lambda each: each.refused(reason))
        how: FinishReason = "interrupted" if fault is None else "error"
        said = None if fault is None else str(fault)
        self._send(End(how, None, "", self.ticket.prompt_tokens, 0, None, None, None, error=said))

    def interrupt(self) -> None:
        """End before its time: nobody waits for it any more, or the server closes."""
        assert self.live is not None
        self.live.finish("interrupted")
        self.end("abort")

    def end(self, reason: str | None = None) -> None:
        """Tell that it is over, where its run has an end. A second call does nothing."""
        assert self.live is not None
        trace = self.live.traces[0]
        if self.over or trace.end is None:
            return
        self.over = True
        self._record(lambda archive: archive.settle(self.run_id, trace))
        seconds, how = time.perf_counter() - self._came_at, reason or trace.end.finish_reason
        self._watch(lambda each: each.ended(self.run_id, trace, seconds, how))
        self._send(trace.end)

    def _tell(self, step: Step) -> None:
        now = time.perf_counter()
        seconds, self._told_at = now - self._told_at, now
        self._record(lambda archive: archive.write(self.run_id, step))
        self._watch(lambda each: each.stepped(self.run_id, step, seconds))
        self._send(step)

    def _watch(self, tell: Callable[[Watcher], None]) -> None:
        """Tell the watchers; one that fails is no reason for the client to suffer."""
        for watcher in self._watchers:
            with _logged("a watcher"):
                tell(watcher)

    def _record(self, tell: Callable[[Archive], None]) -> None:
        """Tell the archive, in the same way."""
        if self._archive is not None:
            with _logged("the archive"):
                tell(self._archive)

    def _send(self, what: Step | End) -> None:
        """To the client; one that cannot be reached has gone."""
        try:
            self._deliver(what)
        except Exception as fault:
            _log.warning("run %s cannot be delivered", self.run_id, exc_info=fault)
            self.ticket.cancelled = True


@contextmanager
def _logged(who: str) -> Iterator[None]:
    """A fault inside is told to the log and nobody else."""
    try:
        yield
    except Exception:
        _log.exception("%s failed", who)
