"""From steps to a row of figures, and from rows to what a setting does over its seeds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, pstdev

from decodescope.analysis.repeats import find_loop
from decodescope.analysis.repetition import distinct, repetition_rate
from decodescope.experiments.sample_grid import PlannedRow
from decodescope.experiments.sample_records import Parting, SampleRow, SettingSummary, Spread, Value
from decodescope.trace.records import FinishReason, Step

_SAID_BY_ROWS = "note.temperature_zero"

Naming = Callable[[int], str | None]  # token id -> its text, None where that is not known


@dataclass(frozen=True, slots=True)
class Course:
    """How a row went: its steps, their text, how it ended, and where and why it left the first row."""

    steps: Sequence[Step]
    text: str
    finish_reason: FinishReason | None
    parting: Parting | None = None
    exact_steps: int | None = None


def row_of(planned: PlannedRow, course: Course, name: Naming) -> SampleRow:
    """The figures of one row."""
    steps, parting = course.steps, course.parting
    ids = tuple(step.token_id for step in steps)
    entropies, logprobs = tuple(s.entropy_nats for s in steps), tuple(s.logprob_nats for s in steps)
    return SampleRow(
        name=planned.name,
        settings=settings_of(planned),
        stages=planned.params.chain(),
        seed=planned.params.seed,
        token_ids=ids,
        text=course.text,
        parts_at=parting.step if parting else None,
        parting=_named(parting, name) if parting else None,
        entropy_nats_mean=fmean(entropies) if ids else None,
        logprob_nats_mean=fmean(logprobs) if ids else None,
        distinct_1=distinct(ids, 1),
        distinct_2=distinct(ids, 2),
        distinct_3=distinct(ids, 3),
        repetition_rate=repetition_rate(ids),
        loop=find_loop(ids, [step.text for step in steps]),
        finish_reason=course.finish_reason,
        exact_steps=course.exact_steps,
        entropy_nats=entropies,
        logprob_nats=logprobs,
        top_prob=tuple(step.candidates[0].prob_raw for step in steps),
    )


def notes_on(planned: Sequence[PlannedRow], others: Sequence[str] = ()) -> tuple[str, ...]:
    """What the reader should know of the rows' settings, and `others`: each once, and none that the rows tell."""
    notes = (note for each in planned for note in each.params.notes)
    return tuple(note for note in dict.fromkeys((*notes, *others)) if note != _SAID_BY_ROWS)


def settings_of(planned: PlannedRow) -> dict[str, Value]:
    """Every setting but the seed."""
    return {name: value for name, value in planned.params.values().items() if name != "seed"}


def _named(parting: Parting, name: Naming) -> Parting:
    return replace(parting, text=name(parting.token_id), first_text=name(parting.first_token_id))


def summed_up(rows: Iterable[SampleRow]) -> tuple[SettingSummary, ...]:
    """What every setting did over its seeds, in the order of the rows."""
    return tuple(_summary(list(same)) for _, same in groupby(rows, key=lambda row: (row.name, row.settings)))


def _summary(rows: Sequence[SampleRow]) -> SettingSummary:
    return SettingSummary(
        name=rows[0].name,
        settings=rows[0].settings,
        seeds=len(rows),
        entropy_nats=_spread(row.entropy_nats_mean for row in rows),
        logprob_nats=_spread(row.logprob_nats_mean for row in rows),
        distinct_2=_spread(row.distinct_2 for row in rows),
        repetition_rate=_spread(row.repetition_rate for row in rows),
        loop_share=fmean(row.loop is not None for row in rows),
        entropy_nats_by_step=_by_step([row.entropy_nats for row in rows]),
        top_prob_by_step=_by_step([row.top_prob for row in rows]),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(fmean(known), pstdev(known)) if known else None


def _by_step(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Means over the rows that came so far."""
    longest = max(map(len, rows))
    return tuple(fmean(row[step] for row in rows if step < len(row)) for step in range(longest))
