"""Engine: one thread that runs every pass; requests join and leave between two of them.

A turn: those whose client has gone leave, those that fit join, some of a prompt is read, and all others get one
token each from one pass over the weights. A request joins when its whole answer has room in the cache, so none is
ever put off half way.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from decodescope.batching import forward_together
from decodescope.errors import InputError
from decodescope.generate import NOTHING, Past
from decodescope.model.cost import CACHE_FORMATS, kv_bytes_per_token
from decodescope.model.kv_cache import KVCache
from decodescope.serving.archive import Archive
from decodescope.serving.orders import Busy, Deliver, Order, Plan, Ticket
from decodescope.serving.prefixes import Held, Prefixes
from decodescope.serving.request import Request
from decodescope.serving.watcher import Watcher
from decodescope.session import Session

_log = logging.getLogger(__name__)
_REASONS = {"run.prompt_too_long": "too_long", "serve.too_large": "too_large"}


class Engine:
    """Serves a session's model. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self, session: Session, plan: Plan, watchers: Sequence[Watcher] = (), archive: Archive | None = None
    ) -> None:
        self.session, self.plan, self.archive = session, plan, archive
        self._watchers = watchers
        held = CACHE_FORMATS[session.cache_dtype or session.dtype]
        self._position_bytes = kv_bytes_per_token(session.model.config, *held)
        self._prefixes = Prefixes()
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._door = threading.Condition()  # of the queue
        self._closing = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="decodescope engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the present pass; what runs ends as interrupted, what waits is not begun."""
        with self._door:
            self._closing = True
            self._door.notify_all()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether somebody works."""
        return self._thread.is_alive() and not self._closing

    def gauges(self) -> dict[str, float]:
        """What is going on now, by the names of its metrics; kept prefixes make way and do not count as used."""
        running = list(self._running)
        lengths = [request.live.cache.length for request in running if request.live]
        return {
            "requests_running": len(running),
            "requests_waiting": len(self._waiting),
            "kv_cache_used_bytes": sum(lengths) * self._position_bytes,
            "kv_cache_reserved_bytes": sum(request.cache_bytes for request in running),
            "kv_cache_capacity_bytes": self.plan.cache_bytes,
        }

    def submit(self, order: Order, deliver: Deliver) -> Ticket:
        """Queue an order. Raises Busy, and InputError for one that could never be carried out."""
        return self.submit_all([order], [deliver])[0]

    def submit_all(self, orders: Sequence[Order], delivers: Sequence[Deliver]) -> list[Ticket]:
        """Queue several orders, all or none. Raises as `submit` does."""
        try:
            if len(orders) > self.plan.most:
                raise InputError("serve.too_many_orders", count=len(orders), most=self.plan.most)
            possible = [self._possible(order) for order in orders]
        except InputError as fault:
            self._refuse(_REASONS.get(fault.key, "invalid"))
            raise
        given = zip(possible, delivers, strict=True)
        requests = [Request(order, deliver, self._watchers, self.archive) for order, deliver in given]
        for request in requests:
            request.cache_bytes = self._wanted_bytes(request.order)
        with self._door:
            self.refuse_if_full(len(orders))
            self._waiting.extend(requests)
            self._door.notify_all()
        return [request.ticket for request in requests]

    def refuse_if_full(self, orders: int = 1) -> None:
        """Raise Busy where orders would not be taken now: worth asking before prompts are made ready."""
        waiting = len(self._waiting)
        if not self.healthy or waiting + orders > self.plan.most_waiting + self._free_places:
            self._refuse("queue_full")
            raise Busy("serve.busy", waiting=waiting)

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go before the next pass; one that is over or unknown stays as it is."""
        with self._door:
            ticket.cancelled = True
            self._door.notify_all()

    @property
    def _free_places(self) -> int:
        return max(self.plan.most_running - len(self._running), 0)

    def _possible(self, order: Order) -> Order:
        """The order as it can be carried out. Raises InputError."""
        room = self.session.room([order.prompt.ids])
        self.session.params(order.options)
        options = replace(order.options, max_new_tokens=min(order.options.max_new_tokens, room))
        order = replace(order, options=replace(options, prefill_chunk=self.plan.prompt_chunk))
        wanted = self._wanted_bytes(order)
        if wanted > self.plan.cache_bytes:
            raise InputError(
                "serve.too_large",
                tokens=len(order.prompt.tokens) + options.max_new_tokens,
                most=self.plan.cache_bytes // self._position_bytes,
            )
        return order

    def _wanted_bytes(self, order: Order) -> int:
        return (len(order.prompt.tokens) + order.options.max_new_tokens) * self._position_bytes

    def _refuse(self, reason: str) -> None:
        for watcher in self._watchers:
            watcher.refused(reason)

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # torch counts them for each thread of the program
        while not self._closing:
            try:
                self._turn()
            except Exception as fault:  # of a pass that all shared
                _log.exception("a turn failed")
                self._each(partial(Request.fail, fault=fault))
        self._each(Request.interrupt)
        self._clear_queue(everything=True)

    def _each(self, end: Callable[[Request], None]) -> None:
        """End all that run."""
        for request in self._running:
            if not request.over:
                request.guarded(partial(end, request))
        self._leave()

    def _turn(self) -> None:
        self._wait()
        self._let_go()
        self._clear_queue()
        self._admit()
        self._read()
        self._decode([request for request in self._running if not request.reads and not request.over])
        self._leave()

    def _wait(self) -> None:
        """Sleep while there is nothing to do."""
        with self._door:
            while not (self._running or self._waiting or self._closing):
                self._door.wait()

    def _let_go(self) -> None:
        for request in self._running:
            if request.ticket.cancelled:
                request.guarded(request.interrupt)
        self._leave()

    def _clear_queue(self, everything: bool = False) -> None:
        """Those that nobody waits for any more leave the queue."""
        with self._door:
            gone = [request for request in self._waiting if everything or request.ticket.cancelled]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            request.abandon()

    def _admit(self) -> None:
        """Let those at the head of the queue join as long as there is a place and room for their whole answers."""
        while self._waiting and self._free_places:
            promised = sum(request.cache_bytes for request in self._running)
            room = self.plan.cache_bytes - promised - self._waiting[0].cache_bytes
            if room < 0:
                return
            with self._door:
                request = self._waiting.popleft()
            self._running.append(request)
            request.guarded(partial(self._join, request, room))

    def _join(self, request: Request, room_bytes: int) -> None:
        order, run_id = request.order, request.run_id
        past = self._past(request, room_bytes)
        options = self.archive.options_for(run_id, order.options) if self.archive else order.options
        request.join(self.session.join(order.prompt, options, past))

    def _past(self, request: Request, room_bytes: int) -> Past:
        """What is known of the beginning of its prompt, in a cache that never outgrows what it was promised."""
        ids, most = request.order.prompt.ids, request.cache_bytes // self._position_bytes
        pasts = [each.live.past() for each in self._running if each.live and not each.reads]
        running = [Held.of(past) for past in pasts if past.cache]
        past = self._prefixes.past_of(ids, running, most, room_bytes)
        if past is not NOTHING:
            return past
        layers = self.session.model.config.num_hidden_layers
        return Past((), (), KVCache(layers, self.session.loading.cache_format, most))

    def _read(self) -> None:
        """Read prompts, the oldest first, as many tokens as others can be made to wait for."""
        left = self.plan.prompt_chunk
        for request in [each for each in self._running if each.reads and not each.over]:
            if request.unread_tokens == 1:
                request.reads = False  # of a prompt that is known: it goes along with the newest tokens of others
            elif left > 0:
                left -= request.unread_tokens
                request.guarded(request.read)

    def _decode(self, ready: Sequence[Request]) -> None:
        """One pass for all that have read their prompts."""
        if not ready:
            return
        started = time.perf_counter()
        forward_together([request.live.decoding for request in ready if request.live])
        forward_s = time.perf_counter() - started
        for request in ready:
            request.guarded(partial(request.step, forward_s))

    def _leave(self) -> None:
        """Those that are over give their places up; what they computed is kept while there is room."""
        over = [request for request in self._running if request.over]
        self._running = [request for request in self._running if not request.over]
        for request in over:
            self._keep(request)

    def _keep(self, request: Request) -> None:
        """Its cache was promised to it, and goes over to the prefixes as it is."""
        end = request.trace.end if request.trace else None
        if request.live is None or end is None or end.finish_reason == "error":
            return
        promised = sum(each.cache_bytes for each in self._running)
        try:
            self._prefixes.keep(request.live.past())
            self._prefixes.shrink_to(self.plan.cache_bytes - promised)
        except Exception:  # what could have been spared is no reason for others to fail
            _log.exception("a prefix could not be kept")
            self._prefixes = Prefixes()
