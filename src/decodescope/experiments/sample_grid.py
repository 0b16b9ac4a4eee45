"""The grid of `sample`: from `temperature=0.3,0.7` and seeds to the settings of every row.

Every combination of the knobs' values is a row, for every seed where it draws: a greedy row uses no random numbers
and stands there once. A preset is a whole setting and no knob: a row of its own, before those of the knobs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from decodescope.errors import InputError
from decodescope.sampling.orders import STAGES
from decodescope.sampling.params import SamplingParams, resolve

NUMBERS = (*STAGES, "penalty_window")
KNOBS = (*NUMBERS, "sampler", "without", "preset")
# greedy: the most probable token and nothing else. checkpoint: its generation_config as it stands.
# checkpoint-greedy: the same with do_sample off, so that its penalties stay in force.
PRESETS = ("greedy", "checkpoint", "checkpoint-greedy")
MOST_ROWS = 1024
DEFAULT_SEEDS = (0,)


@dataclass(frozen=True, slots=True)
class Cell:
    """Settings as they were asked for: sampling values by name, or a preset."""

    name: str  # as on the command line
    given: Mapping[str, Any]
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings, each to be run with every seed. Raises InputError for none, too many, or values that cannot be."""

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = DEFAULT_SEEDS

    def __post_init__(self) -> None:
        if not self.cells or not self.seeds:
            raise InputError("sample.empty_grid", knobs=", ".join(KNOBS))
        rows = len(self.cells) * len(self.seeds)
        if rows > MOST_ROWS:
            raise InputError("sample.too_many_rows", rows=rows, most=MOST_ROWS)
        for cell in self.cells:
            resolve(cell.given)
        for seed in self.seeds:
            SamplingParams(seed=seed)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row to be run: the name of its settings, and these with its seed (None: it draws nothing)."""

    name: str
    params: SamplingParams


def parse_grid(grid: Sequence[str], seeds: str | None = None) -> Grid:
    """The grid of words such as `temperature=0.3,0.7` and seeds such as `42,7,1`. Raises InputError.

    A knob that comes twice has the values of both. `without` takes stages joined by `+`, or `none`.
    """
    values: dict[str, dict[str, None]] = {}
    for word in filter(str.strip, grid):
        name, mark, listed = word.partition("=")
        name = name.strip().replace("-", "_")
        if name not in KNOBS:
            raise InputError("sample.unknown_knob", name=name[:80], known=", ".join(KNOBS))
        found = [part.strip() for part in listed.split(",")]
        if not mark or not all(found):
            raise InputError("sample.no_values", word=word[:80], name=name)
        values.setdefault(name, {}).update(dict.fromkeys(found))
    presets = values.pop("preset", {})
    return Grid((*map(_preset, presets), *_combined(values)), _seeds(seeds))


def settle(grid: Grid, checkpoint: Mapping[str, Any], from_checkpoint: bool = False) -> list[PlannedRow]:
    """Every row with its settings in force; `checkpoint` is the model's generation_config.

    `from_checkpoint`: what the grid leaves open is as the checkpoint has it. Raises InputError.
    """
    rows: list[PlannedRow] = []
    for cell in grid.cells:
        config = _config_of(cell, checkpoint, from_checkpoint)
        drawing = not resolve(cell.given, config).is_greedy
        for seed in grid.seeds if drawing else (None,):
            rows.append(PlannedRow(cell.name, resolve({**cell.given, "seed": seed}, config)))
    return rows


def needs_checkpoint(grid: Grid) -> bool:
    """Whether a preset asks for what the model's checkpoint says."""
    return any(cell.preset not in (None, "greedy") for cell in grid.cells)


def _config_of(cell: Cell, checkpoint: Mapping[str, Any], from_checkpoint: bool) -> Mapping[str, Any] | None:
    match cell.preset:
        case None:
            return checkpoint if from_checkpoint else None
        case "checkpoint":
            return checkpoint
        case "checkpoint-greedy":
            return {**checkpoint, "do_sample": False}
    return None


def _preset(name: str) -> Cell:
    if name not in PRESETS:
        raise InputError("sample.unknown_preset", name=name[:80], known=", ".join(PRESETS))
    return Cell(name, {}, name)


def _combined(values: Mapping[str, Mapping[str, None]]) -> Iterator[Cell]:
    """Every combination of values, the last knob changing fastest; none of no knob."""
    count = 1
    for listed in values.values():
        count *= len(listed)
    if count > MOST_ROWS:
        raise InputError("sample.too_many_rows", rows=count, most=MOST_ROWS)
    for texts in product(*values.values()) if values else ():
        named = dict(zip(values, texts, strict=True))
        name = " ".join(f"{knob}={text}" for knob, text in named.items())
        yield Cell(name, {knob: _value(knob, text) for knob, text in named.items()})


def _value(knob: str, text: str) -> Any:
    if knob == "without":
        return () if text == "none" else tuple(text.split("+"))
    if knob not in NUMBERS:
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError("sampling.not_a_number", name=knob, value=text[:80]) from None


def _seeds(text: str | None) -> tuple[int, ...]:
    """Seeds in their order, each once."""
    if text is None:
        return DEFAULT_SEEDS
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError("sample.seeds", value=text[:80]) from None
