"""`--max-memory`: the most exact way to hold a model that keeps a process within a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from decodescope.errors import InputError
from decodescope.model.footprint import Footprint, footprint
from decodescope.model.precision import Precision
from decodescope.model.weights import Weights

PLANNED_POSITIONS = 4096  # that the cache is to have room for, or as many as the context has


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What matrices are held in (`name`: a dtype, `stored`, int8 ...), and how many layers lie on disk."""

    name: str
    precision: Precision
    layers_on_disk: int
    footprint: Footprint
    positions: int


def plan_memory(
    weights: Weights, ways: Sequence[tuple[str, Precision]], process_bytes: int, limit_bytes: int
) -> MemoryPlan:
    """The first of `ways` that fits whole, else the last one with as many layers in memory as fit: reading a layer
    from disk for every token costs more time than fewer bits do.

    `process_bytes` is what the process takes without the model. Raises InputError where nothing fits.
    """
    positions = min(PLANNED_POSITIONS, weights.config.max_position_embeddings)
    for name, precision in ways:
        needed = footprint(weights, precision, process_bytes, positions)
        if needed.peak_bytes <= limit_bytes:
            return MemoryPlan(name, precision, 0, needed, positions)
    for count in range(1, weights.config.num_hidden_layers + 1):
        needed = footprint(weights, precision, process_bytes, positions, count)
        if needed.peak_bytes <= limit_bytes:
            return MemoryPlan(name, precision, count, needed, positions)
    sizes = {"limit": limit_bytes / 2**30, "needed": needed.peak_bytes / 2**30}
    raise InputError("memory.limit", tokens=positions, **sizes)
