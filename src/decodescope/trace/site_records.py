"""What looking inside a forward pass leaves behind: frozen records, units in the field names, no torch."""

from dataclasses import dataclass

from decodescope.trace.records import Memory


def address(site: str, layer: int | None) -> str:
    """`layers.3.pattern`, or `embed`."""
    return site if layer is None else f"layers.{layer}.{site}"


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One inner value of one forward pass, summed up (`probe.SITES` lists the sites).

    Masked entries are left out; `std` is the population's; sums are of float64. `sum` and the rest are a
    fingerprint: `signature`, the sum of every element times a fixed weight of its place, sees what changes none
    of the others, an exchange of heads. `zeros` is a share. `recomputed` values were not in the run itself.
    """

    step: int
    layer: int | None  # None for embed, final_norm and logits
    site: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    mean: float
    std: float
    min: float
    max: float
    l2: float
    sum: float
    signature: float
    zeros: float
    nonfinite: int
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first value that is NaN or infinite, in the order of computation.

    `before` is the largest finite magnitude at the same position of the site it was computed from, None where
    that was not looked at or is no longer held; `limit` the largest number of the dtype.
    """

    step: int
    layer: int | None
    site: str
    position: int
    index: tuple[int, ...]  # in the value's last axes: unit, or head and unit
    value: str
    source: str | None
    before: float | None
    dtype: str
    limit: float


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer of one pass took: the first one's time includes the embedding; None is last norm and head."""

    step: int
    layer: int | None
    seconds: float
    memory: Memory
