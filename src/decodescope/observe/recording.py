"""Recording: a tap that sums up inner values and keeps the chosen ones whole, within a budget of bytes."""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from decodescope.errors import InputError
from decodescope.model.config import ModelConfig
from decodescope.observe.kept import Dropped, KeptTensors
from decodescope.observe.layer_clock import LayerClock
from decodescope.observe.selection import Place, places, select
from decodescope.observe.sums import Sums
from decodescope.probe import Attended, Shown, Tap, attention_pattern
from decodescope.trace.html import sites_html
from decodescope.trace.site_records import LayerCost, NonFinite, SiteSummary, address

DEFAULT_BUDGET = 256 * 2**20
_AT_THE_END = {("final_norm", None), ("logits", None)}


@dataclass(frozen=True, slots=True)
class Watch:
    """What to look at: patterns of sites (see `selection.select`), in which steps and at which positions.

    None means all. Raises InputError for a budget that cannot be.
    """

    keep: Sequence[str] = ()  # kept whole
    summarise: Sequence[str] = ()
    steps: Container[int] | None = None
    positions: Collection[int] | None = None  # of the sequence; only for what is kept
    budget_bytes: int = DEFAULT_BUDGET
    clock: bool = False  # time and memory of every layer
    beside: tuple[Tap, ...] = ()  # what else looks at the same passes

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise InputError("observe.budget", value=self.budget_bytes)


class Recording:
    """Looks at one run of one sequence.

    recording["layers.3.pattern"][0]    # [H, T, S] of the first pass
    recording.summaries                 # a fingerprint of every site and step
    """

    def __init__(self, config: ModelConfig, watch: Watch) -> None:
        self.watch = watch
        self._clock = LayerClock(self) if watch.clock else None
        self.kept = KeptTensors(watch.budget_bytes)
        self.reconstruction_error: float | None = None  # worst of all rows that were recomputed
        self._keeps, self._summarises = select(config, watch.keep), select(config, watch.summarise)
        self._wanted = self._keeps | self._summarises
        self._order = places(config)
        self._sums = Sums(self._order)
        self._step = self._start = self._stop = 0
        self.taken = False  # by a run: it looks at no other one
        self._newest: tuple[Attended, slice, Tensor] | None = None
        # Small products go several times faster one after the other than scattered over a pass.
        self._later: list[tuple[Place, Attended, int]] = []
        self._rows: dict[Place, int] = {}  # positions of this step received so far

    def begin(self, step: int, start: int, stop: int, every_logit: bool = False) -> Tap | None:
        """The passes over positions `start` to `stop` begin, which lead to the choice of `step`.

        Returns the tap that they are to be given; None where this step is not looked at.
        """
        self._step, self._start, self._stop, self._every_logit = step, start, stop, every_logit
        self._rows.clear()
        self._later = []  # of passes that were broken off
        if self.watch.steps is not None and step not in self.watch.steps:
            return None
        self.kept.begin(step)
        self._sums.begin(step)
        if self._clock is None:
            return self
        self._clock.begin(step)
        return self._clock

    def end(self) -> None:
        """The passes of a step that is looked at are over."""
        with _one_thread():
            for waiting in self._later:
                self._attention(*waiting)
            self._sums.end()
        self._newest, self._later = None, []
        if self._clock:
            self._clock.end()

    def forget_from(self, step: int) -> None:
        """The run goes back: `step` and what came after it will be made anew, or never were."""
        self.kept.forget_from(step)
        self._sums.forget_from(step)
        if self._clock:
            self._clock.forget_from(step)

    @property
    def layer_costs(self) -> list[LayerCost]:
        """Time and memory of every layer and step, where a clock was asked for."""
        return self._clock.costs if self._clock else []

    def wants(self, site: str, layer: int | None) -> bool:
        """Whether this value is looked at."""
        return (site, layer) in self._wanted or any(tap.wants(site, layer) for tap in self.watch.beside)

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """Show a value to the taps beside, sum it up and keep it, as far as that was asked for."""
        for tap in self.watch.beside:
            if tap.wants(site, layer):
                tap.receive(site, layer, value)
        if (site, layer) in self._wanted:
            self._record((site, layer), value)

    def _record(self, place: Place, value: Shown) -> None:
        if isinstance(value, Attended):
            T = value.q_rot.shape[2]
            first = self._position(place, T)
            if T == 1:
                self._later.append((place, value, first))
            else:  # what long chunks are made of is not held on to
                self._attention(place, value, first)
            return
        first = self._position(place, value.shape[-2])
        if place in self._summarises:
            self._sums.add(place, value, first)
        if place in self._keeps:
            self._keep(place, value[0], first)

    @property
    def summaries(self) -> list[SiteSummary]:
        """All that was summed up: by step, then in the order of computation."""
        return self._sums.summaries()

    def summaries_of(self, step: int) -> list[SiteSummary]:
        """Those of one step."""
        return self._sums.summaries(step)

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first NaN or infinity among the values that were summed up."""
        return self._sums.first_nonfinite

    @property
    def dropped(self) -> list[Dropped]:
        """What was to be kept and did not fit into the budget."""
        return self.kept.dropped

    def __getitem__(self, name: str) -> Mapping[int, Tensor]:
        """The tensors kept of one site (`layers.3.pattern`, `embed`), by step, without their batch axis.

        Raises InputError for a site that was not kept.
        """
        kept = {address(*place): place for place in self.kept.places()}
        if name not in kept:
            raise InputError("observe.not_kept", name=name, kept=", ".join(sorted(kept)) or "-")
        return self.kept.tensors(kept[name])

    def __repr__(self) -> str:
        sizes = f"bytes={self.kept.bytes}, budget_bytes={self.watch.budget_bytes}, dropped={len(self.dropped)}"
        return f"Recording(summaries={len(self.summaries)}, kept={len(self.kept.places())} sites, {sizes})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        places = self.kept.places()
        kept = {address(*place): tuple(self.kept.tensors(place)) for place in self._order if place in places}
        dropped: Counter[str] = Counter()
        for gone in self.dropped:
            dropped[address(gone.site, gone.layer)] += gone.bytes
        return sites_html(self.summaries, kept, dropped)

    def _position(self, place: Place, T: int) -> int:
        """Where the first of the next T rows of a value stands in the sequence."""
        if place in _AT_THE_END and not self._every_logit:
            # Each chunk of a long prompt ends with one row of them; only the last is the pass's result.
            self._sums.forget(place)
            self.kept.forget(self._step, place)
            return self._stop - 1
        done = self._rows.get(place, 0)
        self._rows[place] = done + T
        return self._start + done

    def _attention(self, place: Place, value: Attended, first: int) -> None:
        """Recompute scores or pattern, block by block, for all rows or only those that are kept."""
        summed, kept = place in self._summarises, place in self._keeps
        for rows in value.blocks() if summed else self._kept_rows(value, first):
            scores = self._scores(value, rows)  # B H R S
            shown = attention_pattern(scores) if place[0] == "pattern" else scores
            if place[0] == "pattern":
                error = value.error(shown, rows)
                self.reconstruction_error = float(np.maximum(self.reconstruction_error or 0.0, error))  # NaN wins
            if summed:
                self._sums.add_seen(place, shown, value.seen(rows), first + rows.start)
            if kept:
                blank = 0.0 if place[0] == "pattern" else -torch.inf
                wide = F.pad(shown[0], (0, self._stop - shown.shape[3]), value=blank)  # as wide as the last chunk
                self._keep(place, wide, first + rows.start)

    def _scores(self, value: Attended, rows: slice) -> Float[Tensor, "B H R S"]:
        """Scores are asked for twice where both sites are looked at, and computed once if they fit one block."""
        if self._newest is None or self._newest[0] is not value or self._newest[1] != rows:
            self._newest = value, rows, value.scores(rows)
        return self._newest[2]

    def _kept_rows(self, value: Attended, first: int) -> Iterator[slice]:
        """The blocks of rows that hold a position to be kept, cut down to those."""
        if self.watch.positions is None:
            return value.blocks()
        chosen = sorted(p - first for p in self.watch.positions if first <= p < first + value.q_rot.shape[2])
        return (slice(row, row + 1) for row in chosen)

    def _keep(self, place: Place, value: Float[Tensor, "... T Y"], first: int) -> None:
        if self.watch.positions is not None:
            rows = [i for i in range(value.shape[-2]) if first + i in self.watch.positions]
            if not rows:
                return
            value = value[..., rows, :]
        if self.kept.fits(self._step, place, value.numel() * value.element_size()):
            self.kept.add(self._step, place, value)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small work, all on this thread: where another process wants the cores, threads that wait for each other take
    a scheduler tick for every operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
