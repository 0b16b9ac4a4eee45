"""What the machine gives: bytes a second that can be read, multiplications a second; one thread and all."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor

from decodescope.experiments.bench.records import GemmRate, Machine, ReadRate
from decodescope.model.kernels import Arena, available, read_all

GEMM_DTYPES = ("float32", "bfloat16")
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30  # more than most caches hold; no more than need be
_GEMM = 512, 4096, 4096  # rows of activations (a chunk of a prefill), columns, rows of a weight
_TRIES = 3  # of which the fastest counts: whatever disturbs makes it slower
_SCALES, _HOLDS = 1.2, 0.9  # threads are of use if they multiply this much faster and read no slower than this


class Limits:
    """Measures the machine again and again, and remembers what it gave.

    Reading goes over memory as large as `step_bytes`, what a decoding step reads, within bounds: a cache that
    holds part of the one holds part of the other.
    """

    def __init__(self, device: torch.device, threads: int, step_bytes: int) -> None:
        self._device, self._threads = device, threads
        size = min(max(step_bytes, _LEAST_BYTES), _MOST_BYTES)
        take = Arena().take if self._device.type == "cpu" else self._plain
        self._memory = take((size // 4,), torch.float32).fill_(1.0)
        rows, columns, outputs = _GEMM
        self._factors = {
            dtype: tuple(
                torch.rand(shape, device=self._device).to(getattr(torch, dtype))
                for shape in ((rows, columns), (outputs, columns))
            )
            for dtype in GEMM_DTYPES
        }
        self._reads: dict[int, list[float]] = {}
        self._gemms: dict[tuple[str, int], list[float]] = {}

    def read(self, threads: int | None = None) -> float:
        """Bytes a second."""
        used = threads or self._threads
        with _threads(used):
            rate = self._memory.nbytes / self._fastest(self._read_once)
        self._reads.setdefault(used, []).append(rate)
        return rate

    def gemm(self, dtype: str, threads: int | None = None) -> float:
        """Floating-point operations a second of a matrix product, a multiplication and an addition being two."""
        used, (a, b) = threads or self._threads, self._factors[dtype]
        with _threads(used):
            rate = 2 * a.numel() * b.shape[0] / self._fastest(lambda: a @ b.T)
        self._gemms.setdefault((dtype, used), []).append(rate)
        return rate

    def best_gemm(self) -> float:
        """Of the dtype in which it is fastest, all of them measured anew."""
        return max(self.gemm(dtype) for dtype in GEMM_DTYPES)

    def look(self) -> None:
        """Measure every number of threads once."""
        for threads in self.thread_counts:
            self.read(threads)
            for dtype in GEMM_DTYPES:
                self.gemm(dtype, threads)

    @property
    def compiled(self) -> bool:
        """Whether there are compiled kernels to be measured."""
        return self._device.type == "cpu" and available().instructions is not None

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """One thread, then twice as many as long as it goes, and all."""
        if self._device.type != "cpu":
            return (self._threads,)
        counts = {1 << power for power in range(self._threads.bit_length())}
        return tuple(sorted(counts | {self._threads}))

    def machine(self) -> Machine | None:
        """All that was measured so far; None before the first look."""
        if self._threads not in self._reads or len(self._gemms) < len(GEMM_DTYPES) * len(self.thread_counts):
            return None
        read = tuple(ReadRate(n, *_spread(rates)) for n, rates in sorted(self._reads.items()))
        gemm = tuple(GemmRate(dtype, n, *_spread(rates)) for (dtype, n), rates in sorted(self._gemms.items()))
        best = max((g for g in gemm if g.threads == self._threads), key=lambda g: g.flops)
        kernels = available()
        read_gain, gemm_gain = self._gain(self._reads), self._gain(self._gemms_of("float32"))
        return Machine(
            processor=_processor(),
            cores=os.cpu_count() or 1,
            threads=self._threads,
            device=str(self._device),
            memory_total_bytes=psutil.virtual_memory().total,
            load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            torch=str(torch.__version__),
            python=platform.python_version(),
            kernels=kernels.instructions,
            kernels_missing=kernels.reason,
            read=read,
            gemm=gemm,
            read_bytes_per_s=next(r.bytes_per_s for r in read if r.threads == self._threads),
            gemm_flops=best.flops,
            gemm_dtype=best.dtype,
            read_gain=read_gain,
            gemm_gain=gemm_gain,
            threads_in_vain=(read_gain or 1) < _HOLDS or (gemm_gain or _SCALES) < _SCALES,
        )

    def _gemms_of(self, wanted: str) -> dict[int, list[float]]:
        return {threads: rates for (dtype, threads), rates in self._gemms.items() if dtype == wanted}

    def _gain(self, rates: dict[int, list[float]]) -> float | None:
        """All threads / one, as measured in the same rounds; None where there is but one."""
        if self._threads == 1 or not {1, self._threads} <= rates.keys():
            return None
        return median(many / one for one, many in zip(rates[1], rates[self._threads], strict=False))

    def _fastest(self, run: Callable[[], object]) -> float:
        """Seconds."""
        return min(self._seconds(run) for _ in range(_TRIES))

    def _seconds(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - started

    def _read_once(self) -> None:
        if self.compiled:
            read_all(self._memory)
        else:
            self._memory.sum()

    def _plain(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _spread(rates: list[float]) -> tuple[float, float, float, int]:
    """Median, least, most and how many."""
    return median(rates), min(rates), max(rates), len(rates)


def _processor() -> str:
    """The processor's own name, where the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
