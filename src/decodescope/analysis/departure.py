"""Where a run first departs from another one: ids, then settings, then every site in the order of computation.

Fingerprints are compared, not tensors: what can an error of relative size e (||a - b|| / ||b||) do to each figure?
The norm changes by e of itself at most; the sum by e * sqrt(n) * norm (Cauchy-Schwarz), and rounding comes near
that, since the same small error at every position adds up. The weights of the signature change sign from element
to element: rounding adds e * norm, or e of itself where all elements err alike. An extreme is a single element,
which may err more than the whole: four times, as measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from decodescope.sequences import common_length
from decodescope.trace.records import Run
from decodescope.trace.site_records import SiteSummary

# Between a dtype and float32 the largest distance of any site, on 30 layers and 751 positions of a real model, was
# 1.6e-2 (bfloat16) and 2.8e-3 (float16): three times that. In float32 kernels agree within 1e-5: ten times that.
TOLERANCES = {"float32": 1e-4, "float16": 8e-3, "bfloat16": 5e-2}
_EXTREME = 4.0
_STATED = ("model", "sha256", "architecture", "dtype", "weights", "cache_dtype", "device", "attention")
Key = tuple[int, int | None, str]


@dataclass(frozen=True, slots=True)
class Departure:
    """The first site that departs, by the figure that differs most; `distance` is relative (see above).

    It is infinite where the figures cannot be compared: another shape, another count of elements, or of NaN and
    infinities.
    """

    step: int
    layer: int | None
    site: str
    figure: str
    here: str
    there: str
    distance: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not the same in the two runs."""

    name: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside an earlier one.

    `ids_part_at` is the first position whose ids differ, and then no site is compared; `tokens_part_at` the first
    step that chose another token: the steps after it had other input. `compared` sites are in both runs, `missing`
    in one of them alone; `largest_distance` is that of the sites up to the departure, which is left out.
    """

    folder: str
    ids_part_at: int | None
    tokens_part_at: int | None
    differences: tuple[Difference, ...]
    tolerance: float
    compared: int
    missing: int
    largest_distance: float
    departure: Departure | None

    @property
    def departs(self) -> bool:
        """Whether the two runs are not the same."""
        return any(part is not None for part in (self.ids_part_at, self.tokens_part_at, self.departure))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run leaves for a comparison: its header, the tokens it chose, its fingerprints."""

    run: Run
    token_ids: tuple[int, ...]
    sites: Sequence[SiteSummary]

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the prompt."""
        return tuple(token.token_id for token in self.run.prompt_tokens)


def compare_runs(here: Seen, there: Seen, folder: str, tolerance: float | None = None) -> Comparison:
    """`here` beside `there`, an earlier run in `folder`; without `tolerance` that of the coarser dtype."""
    allowed = _tolerance(here.run, there.run) if tolerance is None else tolerance
    ids_part_at = _parts_at(here.ids, there.ids)
    common = min(len(here.token_ids), len(there.token_ids))
    tokens_part_at = (
        None if ids_part_at is not None else _parts_at(here.token_ids[:common], there.token_ids[:common])
    )
    last_step = -1 if ids_part_at is not None else common if tokens_part_at is None else tokens_part_at
    ours = {_key(site): site for site in here.sites}
    theirs = {_key(site): site for site in there.sites}
    both = [key for key in ours if key in theirs and key[0] <= last_step]
    departure, largest = first_departure([(ours[key], theirs[key]) for key in both], allowed)
    return Comparison(
        folder=folder,
        ids_part_at=ids_part_at,
        tokens_part_at=tokens_part_at,
        differences=_differences(here.run, there.run),
        tolerance=allowed,
        compared=len(both),
        missing=len(ours.keys() ^ theirs.keys()),
        largest_distance=largest,
        departure=departure,
    )


def first_departure(
    pairs: Sequence[tuple[SiteSummary, SiteSummary]], tolerance: float
) -> tuple[Departure | None, float]:
    """The first pair further apart than `tolerance`, and the largest distance before it."""
    largest = 0.0
    for here, there in pairs:
        figure, distance = furthest(here, there)
        if distance > tolerance:
            ours, theirs = str(getattr(here, figure)), str(getattr(there, figure))
            return Departure(here.step, here.layer, here.site, figure, ours, theirs, distance), largest
        largest = max(largest, distance)
    return None, largest


def furthest(here: SiteSummary, there: SiteSummary) -> tuple[str, float]:
    """The figure that differs most between two fingerprints of one site, and its relative distance."""
    for figure in ("shape", "count", "nonfinite"):
        if getattr(here, figure) != getattr(there, figure):
            return figure, math.inf
    root = math.sqrt(there.count)
    extreme = _EXTREME * max(abs(there.min), abs(there.max))
    scales = {
        "l2": there.l2,
        "std": there.l2 / root,
        "min": extreme,
        "max": extreme,
        "sum": root * there.l2,
        "signature": there.l2 + abs(there.signature),
    }
    distances = {
        name: _distance(getattr(here, name), getattr(there, name), scale) for name, scale in scales.items()
    }
    return max(distances.items(), key=lambda each: each[1])


def _distance(here: float, there: float, scale: float) -> float:
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    distance = abs(here - there) / scale if scale else math.inf
    return math.inf if math.isnan(distance) else distance


def _tolerance(here: Run, there: Run) -> float:
    dtypes = {each for run in (here, there) for each in (run.dtype, run.cache_dtype or run.dtype)}
    return max(TOLERANCES.get(each, TOLERANCES["bfloat16"]) for each in dtypes)


def _differences(here: Run, there: Run) -> tuple[Difference, ...]:
    """The settings that must be the same for numbers to be, as far as a header tells."""
    pairs = [(field.name, getattr(here, field.name), getattr(there, field.name)) for field in fields(Run)]
    stated = [(name, ours, theirs) for name, ours, theirs in pairs if name in _STATED]
    stated.append(("torch", here.versions.get("torch"), there.versions.get("torch")))
    return tuple(Difference(name, str(ours), str(theirs)) for name, ours, theirs in stated if ours != theirs)


def _parts_at(here: Sequence[int], there: Sequence[int]) -> int | None:
    """The first index where two sequences differ, or where only one goes on."""
    same = common_length(here, there)
    return None if same == len(here) == len(there) else same


def _key(site: SiteSummary) -> Key:
    return site.step, site.layer, site.site
