"""Waiting for what another thread does."""

import time
from collections.abc import Callable

PATIENCE_S = 30  # far more than anything here needs on a busy machine


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds, or fail."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
