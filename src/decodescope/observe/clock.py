"""Seconds and bytes, measured: time of a section of work, and the memory of process and device."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from decodescope.trace.records import Memory

_process = psutil.Process()


class Stopwatch:
    """Adds up the wall time spent in named sections; waits for the device so that its work is counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time one section; its seconds replace those of an earlier one of that name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            self.seconds[name] = time.perf_counter() - started


def memory_now(device: torch.device) -> Memory:
    """Resident bytes of this process, and bytes the device's allocator holds (None on a CPU)."""
    on_device = None if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))
    return Memory(_process.memory_info().rss, on_device)


def peak_rss_bytes() -> int:
    """The most resident memory this process ever held, by the system's own account."""
    if sys.platform == "win32":
        return int(_process.memory_info().peak_wset)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
