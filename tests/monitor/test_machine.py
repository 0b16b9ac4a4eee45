"""Memory limits and devices: what can be told is told, what cannot is left out."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from decodescope.monitor.machine import device_figures, machine_figures, memory_limit_bytes

RAM = psutil.virtual_memory().total


def groups(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    return root, root / "own"


@pytest.mark.parametrize(
    "own, files, limit",
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/memory.max": "1000\n"}, 500),
        ("0::/unseen\n", {"memory.max": "700\n"}, 700),
        ("3:cpu:/\n5:memory,hugetlb:/x\n", {"memory/memory.limit_in_bytes": "900\n"}, 900),
        ("5:memory:/x\n", {"memory/x/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, RAM),
        ("0::/\n", {"memory.max": "max\n"}, RAM),
        ("", {}, RAM),
    ],
)
def test_the_tightest_limit_of_the_control_groups_counts(tmp_path, own, files, limit):
    assert memory_limit_bytes(*groups(tmp_path, own, files)) == limit


def test_without_control_groups_it_is_the_machines_memory(tmp_path):
    assert memory_limit_bytes(tmp_path, tmp_path / "none") == RAM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to these limits")
@pytest.mark.parametrize(("limit", "taken"), [("RLIMIT_DATA", "data"), ("RLIMIT_AS", "vms")])
@pytest.mark.parametrize("left_bytes", [64 << 20, 8 << 20])
def test_a_limit_of_the_process_itself_leaves_what_it_has_and_what_it_may_still_get(
    tmp_path, limit, taken, left_bytes
):
    import resource  # not on Windows

    number, memory = getattr(resource, limit), psutil.Process().memory_info()
    usual = resource.getrlimit(number)
    resource.setrlimit(number, (getattr(memory, taken) + left_bytes, usual[1]))
    try:
        most = memory_limit_bytes(tmp_path, tmp_path / "none")
    finally:
        resource.setrlimit(number, usual)
    assert most == pytest.approx(memory.rss + left_bytes, abs=4 << 20)


class Refused(Exception):
    pass


class Driver:
    """Stands for the driver's library: two devices, some of whose questions are refused."""

    NVMLError, NVML_TEMPERATURE_GPU = Refused, 0

    def __init__(self, *refuses: str, loads: bool = True) -> None:
        self.refuses, self.loads = refuses, loads

    def answer(self, name: str, value: object) -> object:
        if name in self.refuses:
            raise Refused
        return value

    def nvmlInit(self) -> None:
        if not self.loads:
            raise Refused

    def nvmlDeviceGetCount(self) -> object:
        return self.answer("count", 2)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return self.answer(f"handle {index}", index)

    def nvmlDeviceGetUUID(self, handle: int) -> object:
        return self.answer("uuid", f"GPU-{handle}")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return self.answer("memory", SimpleNamespace(used=30, total=80))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> object:
        return self.answer("temperature", 61)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> object:
        return self.answer("power", 250_500)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        return self.answer("utilization", SimpleNamespace(gpu=40, memory=10))


WHOLE = {
    "device_memory_used_bytes": 30,
    "device_memory_total_bytes": 80,
    "device_temperature_celsius": 61,
    "device_power_watts": 250.5,
    "device_utilization_ratio": 0.4,
}


def test_a_device_is_told_in_base_units():
    assert device_figures(Driver()) == {"nvml:0": WHOLE, "nvml:1": WHOLE}


@pytest.mark.parametrize(
    "question, lacks",
    [
        ("memory", ("device_memory_used_bytes", "device_memory_total_bytes")),
        ("temperature", ("device_temperature_celsius",)),
        ("power", ("device_power_watts",)),
        ("utilization", ("device_utilization_ratio",)),
        ("uuid", ()),
    ],
)
def test_a_question_that_is_refused_leaves_out_its_own_series_alone(question, lacks):
    left = {name: value for name, value in WHOLE.items() if name not in lacks}
    assert device_figures(Driver(question)) == {"nvml:0": left, "nvml:1": left}


def test_a_device_that_cannot_be_asked_at_all_is_left_out():
    assert set(device_figures(Driver("handle 0"))) == {"nvml:0"}, "what is left is counted anew"
    assert device_figures(Driver("count")) == {}


def test_without_a_driver_there_are_no_devices():
    assert device_figures(Driver(loads=False)) == {}


@pytest.fixture
def used_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that this process has tensors on the second of two devices."""
    for name, answer in {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 2,
        "max_memory_allocated": lambda index: (0, 500)[index],
        "get_memory_info": lambda index: (20, 100),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)


def test_an_accelerator_without_that_driver_has_memory_alone_and_only_where_it_is_used(used_by_torch):
    memory = {"device_memory_peak_bytes": 500, "device_memory_used_bytes": 80, "device_memory_total_bytes": 100}
    assert device_figures(Driver(loads=False)) == {"cuda:1": memory}


def test_a_device_in_use_is_called_as_torch_calls_it_whatever_its_place_in_the_drivers_list(
    used_by_torch, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=str(1 - index)))
    assert device_figures(Driver()) == {"cuda:1": WHOLE | {"device_memory_peak_bytes": 500}, "cuda:0": WHOLE}


def test_the_machine_is_told_by_the_names_of_the_series():
    names = [name for name, _, value in machine_figures() if value > 0]
    assert names[:3] == ["process_resident_bytes", "process_peak_resident_bytes", "machine_memory_bytes"]
