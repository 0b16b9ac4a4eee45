"""Who has the cores while a token is computed: our helpers, or OpenMP's threads.

torch lets a second thread help with operations of a few microseconds. Afterwards it spins, a millisecond and more
unless the environment says otherwise, on the core that our next product needs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class _Inside:
    """How many passes are inside `helpers_alone`, and how many threads torch was given before the first."""

    passes: int = 0
    given: int = 1
    turn: threading.Lock = field(default_factory=threading.Lock)


_inside = _Inside()


def threads() -> int:
    """How many threads a product takes: as many as torch was given."""
    return _inside.given if _inside.passes else torch.get_num_threads()


@contextmanager
def helpers_alone() -> Iterator[None]:
    """Inside, torch keeps to the calling thread, and our kernels still take all that torch was given.

    torch counts threads for each thread of the program, but one that meets torch for the first time meanwhile, and
    MKL everywhere, take over the one.
    """
    now = torch.get_num_threads()  # asked for in every thread: only then does the thread keep its own number
    with _inside.turn:
        if not _inside.passes:
            _inside.given = now
        _inside.passes += 1
        given = _inside.given
    try:
        torch.set_num_threads(1)
        yield
    finally:
        with _inside.turn:
            _inside.passes -= 1
        torch.set_num_threads(given)
