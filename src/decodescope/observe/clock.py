"""Seconds and bytes, measured: time of a section of work, and the memory of process and device."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from decodescope.trace.records import Memory

_process = psutil.Process()
_STATUS = Path("/proc/self/status")


class Stopwatch:
    """The wall time of named sections, each as of its last run; waits for the device so that its work counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time one section."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            self.seconds[name] = time.perf_counter() - started


def memory_now(device: torch.device) -> Memory:
    """Resident bytes of this process, and bytes in tensors on the device (None on a CPU)."""
    on_device = None if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))
    return Memory(_process.memory_info().rss, on_device)


def peak_rss_bytes() -> int:
    """The most resident memory this process ever held, by the system's own account."""
    if _STATUS.exists():  # what getrusage says includes the parent's peak from before exec
        line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line:
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(_process.memory_info().peak_wset)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
