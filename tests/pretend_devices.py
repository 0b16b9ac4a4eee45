"""Devices that are none: tensors of main memory that behave as if they lay on `pretend:0`, `pretend:1` ...

As on real devices, an operation on tensors of two of them, or of one and the processor, is an error, numpy cannot
look at them, and only `.to()` and `copy_` go across. What they compute is what the processor computes, to the bit.
torch's way to make a device in Python is experimental; it is registered once, for the whole process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_CROSSING = {_aten._to_copy.default, _aten.copy_.default}
_TAKES_INDICES = {_aten.index.Tensor, _aten.index_put_.default}  # from the processor, too


Move = tuple[str, str, tuple[int, ...]]  # from a device to another, a tensor of this shape
_moves: list[Move] = []


class OnPretend(Tensor):
    """A tensor on a pretend device; `raw` is the one in main memory."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> "OnPretend":
        found = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        found.raw = raw
        return found

    def __repr__(self) -> str:
        return f"OnPretend({self.raw}, {self.device})"

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Devices(TorchDispatchMode):
    """While it is in force, tensors can be made on pretend devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is _aten.to:  # which inference mode does not take apart
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


@contextmanager
def pretend_devices(
    count: int, monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1 << 30
) -> Iterator[list[Move]]:
    """This machine has `count` accelerators, `pretend:0` and so on. Yields the crossings: from, to, shape."""
    module = _register()
    module.count, module.free_bytes = count, free_bytes
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("pretend")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 1000 + device.index)
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device=...) goes by way of the processor
    try:
        with _Devices():
            _moves.clear()
            yield _moves
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Module(backend_registration._DummyBackendModule):
    count, free_bytes = 1, 0

    def device_count(self) -> int:
        return self.count

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free_bytes, 2 * self.free_bytes


@cache
def _register() -> _Module:
    module = _Module()
    backend_registration._setup_privateuseone_for_python_backend("pretend", backend_module=module)
    return module


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in tensors if isinstance(each, OnPretend)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if func not in _CROSSING:
        _refuse_mixture(func, tensors)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(OnPretend, lambda each: each.raw, (args, kwargs))
    out = func(*args, **kwargs)
    if func is _aten.copy_.default:
        there, asked = [each for each in tensors[:1] if isinstance(each, OnPretend)], None
    elif func is _aten._to_copy.default and asked is not None and asked != tensors[0].device:
        _moves.append((str(tensors[0].device), str(asked), tuple(out.shape)))
    device = asked or (there[0].device if there else torch.device("cpu"))
    if device.type != "pretend":
        return out
    known = {id(each.raw): each for each in there}  # what an operation in place gives back is what it got
    with torch.inference_mode(all(each.is_inference() for each in there) and torch.is_inference_mode_enabled()):
        return tree_map_only(
            Tensor, lambda each: known[id(each)] if id(each) in known else OnPretend(each, device), out
        )


def _refuse_mixture(func: Any, tensors: list[Tensor]) -> None:
    """A number without axes may lie anywhere."""
    devices = {each.device for each in tensors if each.device.type == "pretend" or each.ndim}
    if func in _TAKES_INDICES:
        devices.discard(torch.device("cpu"))
    if len(devices) > 1:
        raise RuntimeError(f"{func} on tensors of {', '.join(sorted(map(str, devices)))}")
