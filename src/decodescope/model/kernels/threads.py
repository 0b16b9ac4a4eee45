"""Who has the cores while a token is computed: our helpers, or OpenMP's threads.

torch lets a second thread help with operations of a few microseconds. Afterwards it spins, a millisecond and more
unless the environment says otherwise, on the core that our next product needs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_here = threading.local()


def threads() -> int:
    """How many threads a product takes: as many as torch was given."""
    given: int | None = getattr(_here, "threads", None)
    return torch.get_num_threads() if given is None else given


@contextmanager
def helpers_alone() -> Iterator[None]:
    """Inside, torch keeps to the calling thread, and our kernels still take all that torch was given."""
    torchs, before, _here.threads = torch.get_num_threads(), getattr(_here, "threads", None), threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.threads = before
        torch.set_num_threads(torchs)
