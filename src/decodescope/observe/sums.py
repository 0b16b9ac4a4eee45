"""Sums: the statistics of all watched sites of a run, gathered while it goes and measured in groups."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from decodescope.observe.selection import Place
from decodescope.observe.statistics import Statistics, measure, measure_seen
from decodescope.probe import BY_NAME
from decodescope.trace.site_records import NonFinite, SiteSummary

_PENDING = 2**19  # elements that may wait to be measured; a layer is never cut


class _Waiting(NamedTuple):
    place: Place
    value: Float[Tensor, "1 ... T Y"]
    first: int  # position of the first row


class _Form(NamedTuple):
    shape: tuple[int, ...]  # of the whole step, batch axis included
    dtype: torch.dtype


class _Packed(NamedTuple):
    """All of a step, small: a long run has many."""

    forms: dict[Place, _Form]
    figures: npt.NDArray[np.float64]  # a line a place, in the order of computation

    def lines(self) -> Iterator[tuple[Place, _Form, list[float]]]:
        for (place, form), line in zip(self.forms.items(), self.figures, strict=True):
            yield place, form, line.tolist()


class Sums:
    """Statistics by step and place; `order` lists all places in the order of computation."""

    def __init__(self, order: Sequence[Place]) -> None:
        self.first_nonfinite: NonFinite | None = None
        self._places, self._order = order, {place: i for i, place in enumerate(order)}
        self._last_layer = max(layer for _, layer in order if layer is not None)
        self._packed: dict[int, _Packed] = {}
        self._known: dict[_Form, _Form] = {}  # one object for a form, however many places and steps have it
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step starts, or starts again."""
        self._step = step
        self._packed.pop(step, None)
        self._forms: dict[Place, _Form] = {}
        self._figures: dict[int, npt.NDArray[np.float64]] = {}  # by the place's order: a line of `Statistics`
        self._waiting: list[_Waiting] = []
        self._elements = 0

    def forget_from(self, step: int) -> None:
        """What is known of `step` and later ones is of no branch any more."""
        self._packed = {each: packed for each, packed in self._packed.items() if each < step}
        if self.first_nonfinite and self.first_nonfinite.step >= step:
            self.first_nonfinite = None

    def end(self) -> None:
        """All values of the step are in."""
        self._flush()
        known = sorted(self._figures)
        figures = np.stack([self._figures[i] for i in known]) if known else np.empty((0, 9))
        self._packed[self._step] = _Packed(
            {p: self._forms[p] for p in map(self._places.__getitem__, known)}, figures
        )

    def forget(self, place: Place) -> None:
        """A value that came before was only on the way to one that comes now."""
        self._forms.pop(place, None)
        self._figures.pop(self._order[place], None)
        self._waiting = [waiting for waiting in self._waiting if waiting.place != place]

    def add(self, place: Place, value: Float[Tensor, "1 ... T Y"], first: int) -> None:
        """The next positions of one value, `first` being the position of the first; measured a little later."""
        layer = place[1]
        if self._elements > _PENDING and layer is not None and layer != self._waiting[-1].place[1]:
            self._flush()
        self._waiting.append(_Waiting(place, value, first))
        self._elements += value.numel()

    def add_seen(
        self, place: Place, value: Float[Tensor, "1 H R S"], seen: Bool[Tensor, "1 1 R S"] | None, first: int
    ) -> None:
        """The next rows of scores or pattern; columns that are not `seen` are left out."""
        if seen is None:
            self.add(place, value, first)
            return
        self._note_form(place, value)
        found = measure_seen(value, seen, first)
        if found.nonfinite:
            self._note_nonfinite(_Waiting(place, value.where(seen, 0), first))
        self._join(place, np.array(found, dtype=np.float64))

    def summaries(self, step: int | None = None) -> list[SiteSummary]:
        """What is known of one step, or of all."""
        steps = sorted(self._packed) if step is None else [step] if step in self._packed else []
        return [
            _summary(each, place, form, line) for each in steps for place, form, line in self._packed[each].lines()
        ]

    def _note_form(self, place: Place, value: Float[Tensor, "1 ... T Y"]) -> None:
        before, shape = self._forms.get(place), tuple(value.shape)
        if before is not None:
            *head, T, width = shape  # of scores and pattern it grows from chunk to chunk
            shape = (*head, before.shape[-2] + T, max(before.shape[-1], width))
        form = _Form(shape, value.dtype)
        self._forms[place] = self._known.setdefault(form, form)

    def _join(self, place: Place, line: npt.NDArray[np.float64]) -> None:
        at = self._order[place]
        if at in self._figures:
            before, after = Statistics(*self._figures[at].tolist()), Statistics(*line.tolist())
            line = np.array(before.joined(after))
        self._figures[at] = line

    def _flush(self) -> None:
        """Measure what is waiting: values of one shape together."""
        groups: dict[tuple[object, ...], list[_Waiting]] = defaultdict(list)
        for waiting in self._waiting:
            self._note_form(waiting.place, waiting.value)
            value = waiting.value
            groups[value.shape, value.dtype, value.device, waiting.first].append(waiting)
        for group in groups.values():
            lines = measure([waiting.value for waiting in group], group[0].first)
            for broken in np.flatnonzero(lines[:, -1]):
                self._note_nonfinite(group[broken])
            for waiting, line in zip(group, lines, strict=True):
                self._join(waiting.place, line)
        self._waiting, self._elements = [], 0

    def _note_nonfinite(self, at: _Waiting) -> None:
        """Keep the earliest: of the first step, the first in the order of computation."""
        known = self.first_nonfinite
        order = self._order[at.place]
        if known and (known.step, self._order[known.site, known.layer]) <= (self._step, order):
            return
        rows = at.value[0].movedim(-2, 0)
        row, *index = (int(i) for i in torch.nonzero(~torch.isfinite(rows))[0])
        source = self._source(at.place)
        before = self._largest(source, at.first + row)
        self.first_nonfinite = NonFinite(
            step=self._step,
            layer=at.place[1],
            site=at.place[0],
            position=at.first + row,
            index=tuple(index),
            value=str(float(rows[row][tuple(index)])),
            source=None if before is None or source is None else source[0],
            before=before,
            dtype=str(rows.dtype).removeprefix("torch."),
            limit=torch.finfo(rows.dtype).max,
        )

    def _source(self, place: Place) -> Place | None:
        """The place whose value this one is computed from, as far as the model has it."""
        site, layer = place
        if site == "final_norm":
            return "resid_post", self._last_layer
        source = BY_NAME[site].source
        while source is not None and (source, layer) not in self._order:
            source = BY_NAME[source].source
        return None if source is None else (source, layer)

    def _largest(self, place: Place | None, position: int) -> float | None:
        """The largest finite magnitude of a waiting value at one position."""
        for waiting in self._waiting:
            row = position - waiting.first
            if waiting.place == place and 0 <= row < waiting.value.shape[-2]:
                values = waiting.value.select(-2, row).float().abs()
                return float(values.where(torch.isfinite(values), 0).max())
        return None


def _summary(step: int, place: Place, form: _Form, figures: list[float]) -> SiteSummary:
    size, mean, m2, least, most, total, signature, zeros, nonfinite = figures
    site, layer = place
    return SiteSummary(
        step=step,
        layer=layer,
        site=site,
        shape=form.shape,
        dtype=str(form.dtype).removeprefix("torch."),
        count=int(size),
        mean=mean,
        std=_root(m2 / size),
        min=least,
        max=most,
        l2=math.inf if max(abs(least), abs(most)) == math.inf else _root(m2 + mean * mean * size),
        sum=total,
        signature=signature,
        zeros=zeros / size,
        nonfinite=int(nonfinite),
        recomputed=BY_NAME[site].recomputed,
    )


def _root(value: float) -> float:
    return float(np.sqrt(value))
