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
            wait_for(self.device)
            self.seconds[name] = time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given; what came from other devices is done then, too."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_now(*devices: torch.device) -> Memory:
    """Resident bytes of this process, and bytes in tensors on the devices (None where they are a CPU)."""
    held = [int(torch.accelerator.memory_allocated(device)) for device in devices if device.type != "cpu"]
    return Memory(_process.memory_info().rss, sum(held) if held else None)


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
