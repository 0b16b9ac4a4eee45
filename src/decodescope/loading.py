"""Loading: how to hold a model, in one value that is checked before anything is read."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.model.cache_formats import FORMATS
from decodescope.model.checkpoint import Progress, fill
from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.devices import devices_called
from decodescope.model.fastest import fastest
from decodescope.model.footprint import process_bytes
from decodescope.model.kernels import is_built
from decodescope.model.memory_plan import MemoryPlan, plan_memory
from decodescope.model.precision import AUTO, Precision, check_precision, choose_precision
from decodescope.model.random_weights import RandomWeights
from decodescope.model.streaming import matrices_on_disk, measured_read_speed, spread
from decodescope.model.weights import Weights, open_weights
from decodescope.models import Report
from decodescope.observe.clock import memory_now

MOST_THREADS = 1024
ALL = "all"  # layers on disk
_COUNT = re.compile(r"\d{1,6}", re.ASCII)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Loading:
    """What a model is held in and where: see `model.precision.choose_precision`.

    `threads` is torch's number of threads, for the whole process. Raises InputError for values that cannot be.
    """

    dtype: str | None = None
    quantize: str = "none"
    cache_dtype: str | None = None  # of keys and values, a name in `model.cache_formats`; None: the activations'
    device: str = "cpu"
    threads: int | None = None
    random_weights: Path | str | None = None  # a config.json or its folder: its shapes, random numbers
    layers_on_disk: int | str = 0  # how many, or "all"
    max_memory_bytes: int | None = None  # of the whole process: precision and layers on disk are chosen for it

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise InputError("threads", value=self.threads, most=MOST_THREADS)
        check_precision(self.dtype, self.quantize)
        devices_called(self.device)
        if self.cache_dtype is not None and self.cache_dtype not in FORMATS:
            raise InputError("cache_dtype.unknown", name=self.cache_dtype, known=", ".join(FORMATS))
        if self.layers_on_disk != ALL and not _COUNT.fullmatch(str(self.layers_on_disk)):
            raise InputError("disk.layers", value=self.layers_on_disk)
        if self.max_memory_bytes is not None and str(self.layers_on_disk) != "0":
            raise InputError("memory.limit_chooses")
        if self.max_memory_bytes is not None and devices_called(self.device)[0].type != "cpu":
            raise InputError("disk.device", device=self.device)

    @property
    def cache_format(self) -> torch.dtype | None:
        """What a KV cache holds; None: what comes."""
        return None if self.cache_dtype is None else FORMATS[self.cache_dtype]

    def weights(self, path: Path) -> Weights:
        """The weights that are meant, those at `path` or random ones; reads headers only. Raises InputError."""
        return open_weights(path) if self.random_weights is None else RandomWeights(Path(self.random_weights))

    def load(self, weights: Weights, report: Report, progress: Progress | None) -> CausalLM:
        """The model, held as asked; says what a limit made of it, and what layers on disk cost.

        A limit counts what the process takes already: let it have read the vocabulary. Raises InputError and
        ResourceError as `model.checkpoint.fill` does.
        """
        config, dtype = weights.config, self.settled(report)
        precision, count = self._precision(weights, dtype, self.quantize), self._on_disk(config)
        if self.max_memory_bytes is not None:
            process = process_bytes(memory_now(torch.device("cpu")).rss_bytes, config, vocabulary_read=True)
            plan = plan_memory(weights, self._ways(weights, dtype), process, self.max_memory_bytes)
            report(_said(plan, self.max_memory_bytes))
            precision, count = plan.precision, plan.layers_on_disk
        model = fill(weights, precision, self.device, progress, spread(count, config.num_hidden_layers))
        if count:
            report(_cost_of_disk(model, count))
        return model

    def _on_disk(self, config: ModelConfig) -> int:
        most = config.num_hidden_layers
        count = most if self.layers_on_disk == ALL else int(self.layers_on_disk)
        if count > most:
            raise InputError("disk.most", value=count, most=most)
        return count

    def _ways(self, weights: Weights, dtype: str | None) -> list[tuple[str, Precision]]:
        """The precision asked for; where a limit is to choose, also those of fewer bits that it may lead to."""
        fewer = ("int8", "int4") if dtype is None and self.quantize == "none" else ()
        return [
            (dtype or "stored" if quantize == "none" else quantize, self._precision(weights, dtype, quantize))
            for quantize in (self.quantize, *fewer)
        ]

    def _precision(self, weights: Weights, dtype: str | None, quantize: str) -> Precision:
        return choose_precision(weights, dtype, quantize, devices_called(self.device)[-1])

    def settled(self, report: Report) -> str | None:
        """The dtype, `auto` decided by trying; says what takes time, and what was found."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = devices_called(self.device)[-1]
        if device.type == "cpu" and not is_built():
            report(t("load.compiling"))
        if self.dtype != AUTO:
            return self.dtype
        dtype, speeds = fastest(device)
        tried = {name: f"{1e3 * each.decode_s:.0f} + {1e3 * each.prompt_s:.1f}" for name, each in speeds.items()}
        report(
            t("load.auto", dtype=dtype, tried=", ".join(f"{name} {figures}" for name, figures in tried.items()))
        )
        return dtype


def _said(plan: MemoryPlan, limit_bytes: int) -> str:
    """What a limit led to, in a sentence."""
    sizes = plan.footprint
    return t(
        "load.plan",
        limit=limit_bytes / _GIB,
        name=plan.name,
        weights=sizes.weight_bytes / _GIB,
        positions=plan.positions,
        cache=sizes.cache_bytes / _GIB,
        peak=sizes.peak_bytes / _GIB,
    )


def _cost_of_disk(model: CausalLM, count: int) -> str:
    """What layers on disk cost, in a sentence: reading is measured, tokens a second follow from it."""
    matrices = matrices_on_disk(model).values()
    size, speed = sum(matrix.nbytes for matrix in matrices), measured_read_speed(model)
    return t(
        "load.disk",
        count=count,
        layers=model.config.num_hidden_layers,
        places=", ".join(sorted({str(matrix.file.path) for matrix in matrices})),
        bytes=size / _GIB,
        speed=speed / 1e9,
        tokens=speed / size,
    )
