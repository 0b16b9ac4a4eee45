"""Memory of this process and what devices say of themselves, when asked; what cannot be told is left out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]
import torch

from decodescope.observe.clock import peak_rss_bytes

Figures = dict[str, float]
Figure = tuple[str, tuple[str, ...], float]  # a series of `series`, the values of its own labels, its value
_process = psutil.Process()
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def machine_figures() -> Iterator[Figure]:
    """All of `series.PROCESS_GAUGES` and those of `series.DEVICE_GAUGES` that can be told."""
    for name, value in process_figures().items():
        yield name, (), value
    for device, figures in device_figures().items():
        for name, value in figures.items():
            yield name, (device,), value


def process_figures() -> Figures:
    """Bytes by the names of `series.PROCESS_GAUGES`."""
    return {
        "process_resident_bytes": _process.memory_info().rss,
        "process_peak_resident_bytes": peak_rss_bytes(),
        "machine_memory_bytes": memory_limit_bytes(),
    }


def memory_limit_bytes(mounted: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Resident bytes that this process may have, by the machine, its control groups and its own limits."""
    return min([int(psutil.virtual_memory().total), *_group_limits(mounted, own), *_own_limits()])


def _own_limits() -> Iterator[int]:
    """What is resident, and what `ulimit -d` and `-v` let be allocated beyond all that is.

    They count room that is not resident, too: their own numbers say little of resident bytes, and what has been
    allocated but not used counts as gone. Only Linux holds a process to both (getrlimit(2)).
    """
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    memory = _process.memory_info()
    for limit, taken in ((resource.RLIMIT_DATA, memory.data), (resource.RLIMIT_AS, memory.vms)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield memory.rss + max(most - taken, 0)


def _group_limits(mounted: Path, own: Path) -> Iterator[int]:
    """Limits of groups and of those they lie in, version 2 and version 1; `max` is none."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _up_from(mounted, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _up_from(mounted / "memory", path, "memory.limit_in_bytes")


def _up_from(root: Path, path: str, name: str) -> Iterator[int]:
    """A container may not see its own group's folder, only the root, which then is that group."""
    folder = root / path.lstrip("/")
    for each in (folder, *folder.parents):
        with suppress(OSError):
            text = (each / name).read_text().strip()
            if text.isdecimal():
                yield int(text)
        if each == root:
            return


def device_figures(nvml: Any = pynvml) -> dict[str, Figures]:
    """Figures by the names of `series.DEVICE_GAUGES`, for each device.

    A device that torch has in use is called as torch calls it (`cuda:0`), another by its place in the driver's
    list (`nvml:0`). Asking never wakes a device that this process does not use.
    """
    found: dict[str, Figures] = {}
    names = _names_by_uuid()
    for index, handle in enumerate(_handles(nvml)):
        uuid = _asked(nvml, nvml.nvmlDeviceGetUUID, handle)
        found[names.get(str(uuid), f"nvml:{index}")] = _driver_figures(nvml, handle)
    for device, index in _devices_in_use():
        figures = found.setdefault(device, {})
        figures["device_memory_peak_bytes"] = torch.accelerator.max_memory_allocated(index)
        if "device_memory_total_bytes" not in figures:
            with suppress(RuntimeError, NotImplementedError):
                free, total = torch.accelerator.get_memory_info(index)
                figures |= {"device_memory_used_bytes": total - free, "device_memory_total_bytes": total}
    return {device: figures for device, figures in found.items() if figures}


def _handles(nvml: Any) -> list[Any]:
    if not _driver(nvml):
        return []
    count = _asked(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = (_asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
    return [handle for handle in handles if handle is not None]


@cache
def _driver(nvml: Any) -> bool:
    """Whether there is a driver to ask."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def _driver_figures(nvml: Any, handle: Any) -> Figures:
    """Every question may be answered with "not supported": in a MIG slice, a container, on unified memory."""
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    celsius = _asked(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = _asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    busy = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    figures = {
        "device_memory_used_bytes": None if memory is None else memory.used,
        "device_memory_total_bytes": None if memory is None else memory.total,
        "device_temperature_celsius": celsius,
        "device_power_watts": None if milliwatts is None else milliwatts / 1000,
        "device_utilization_ratio": None if busy is None else busy.gpu / 100,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _devices_in_use() -> Iterator[tuple[str, int]]:
    """The accelerators that tensors of this process lie or lay on."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return
    for index in range(torch.accelerator.device_count()):
        with suppress(RuntimeError, NotImplementedError):
            if torch.accelerator.max_memory_allocated(index):
                yield f"{kind.type}:{index}", index


def _names_by_uuid() -> dict[str, str]:
    """What torch calls the driver's devices: the order of the two lists may differ."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    uuids = (torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count()))
    return {f"GPU-{uuid}": f"cuda:{index}" for index, uuid in enumerate(uuids)}
