"""From the engine's thread to the event loop: what requests deliver, held for a slow reader up to a bound."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from decodescope.trace.records import End, Step

MOST_WAITING = 512  # records that a client has not taken yet


class Feed:
    """Records of several requests in the order they come. Made in the event loop; `deliver` is for the engine.

    A reader that falls `most` records behind is `overrun`: nothing more is kept for it, and `on_overrun` is
    called once, in the event loop.
    """

    def __init__(self, on_overrun: Callable[[], None], most: int = MOST_WAITING) -> None:
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
        self._records: deque[tuple[int, Step | End]] = deque()
        self._on_overrun, self._most = on_overrun, most
        self.overrun = False

    def deliver(self, index: int) -> Callable[[Step | End], None]:
        """What the engine calls with the records of request `index`, from its own thread."""

        def put(record: Step | End) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._put, index, record)

        return put

    async def next(self, seconds: float | None = None) -> tuple[int, Step | End] | None:
        """The next record and its request's index; None when none came within `seconds`, or on an overrun."""
        if not self._records and not self.overrun:
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        return self._records.popleft() if self._records and not self.overrun else None

    def _put(self, index: int, record: Step | End) -> None:
        if self.overrun:
            return
        self._records.append((index, record))
        if len(self._records) > self._most:
            self.overrun = True
            self._records.clear()
            self._on_overrun()
        self._arrived.set()
