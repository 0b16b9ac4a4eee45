"""Settings side by side: one prompt, read once, and a row for every setting and seed, decoded as a batch."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from decodescope.errors import InputError
from decodescope.experiments.sample_grid import Grid, PlannedRow, settle
from decodescope.experiments.sample_parting import Chosen, Junction, Replay
from decodescope.experiments.sample_records import Parting, SampleReport, SampleRow
from decodescope.experiments.sample_rows import Course, notes_on, row_of, summed_up
from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress
from decodescope.options import RunOptions
from decodescope.sequences import common_length
from decodescope.session import Session
from decodescope.text.chat import Prompt
from decodescope.trace.records import Step, Trace

ROWS_AT_ONCE = 16  # of a batch: more gain little speed and take memory
MOST_SAVED = 64  # rows that are saved decode as one batch


class SideBySide:
    """Rows being decoded: follow `steps()`, then ask for the `report()`, which tells what there is at any time.

    `options` say everything but the sampling settings, which the grid says; from `checkpoint_settings` on they
    start where the checkpoint does. Raises InputError before any work is done.
    """

    def __init__(self, session: Session, prompt: Prompt, grid: Grid, options: RunOptions) -> None:
        self.planned = settle(grid, session.settings, options.checkpoint_settings)
        if options.save is not None and len(self.planned) > MOST_SAVED:
            raise InputError("sample.too_many_saved", rows=len(self.planned), most=MOST_SAVED)
        self._session, self._prompt, self._options = session, prompt, _options(options, len(self.planned))
        self._at_once = MOST_SAVED if options.save else ROWS_AT_ONCE
        self._rows: list[SampleRow] = []
        self._first: list[int] = []  # tokens of the first row
        self._traces: list[Trace] = []  # of the newest batch
        self._seconds = 0.0

    @property
    def begun(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._traces)

    def steps(self, reading: Progress | None = None) -> Generator[tuple[int, int]]:
        """Decode all rows; yields (tokens so far, tokens at most). Whatever ends it, what was decoded is kept.

        Raises ResourceError, and FindingError for non-finite logits.
        """
        most = len(self.planned) * self._options.max_new_tokens
        for start in range(0, len(self.planned), self._at_once):
            batch, done = self.planned[start : start + self._at_once], start * self._options.max_new_tokens
            with closing(self._decode(batch, reading)) as counts:
                for count in counts:
                    yield done + count, most

    def report(self) -> SampleReport:
        """The rows as far as they have come."""
        run = self._traces[0].run
        return SampleReport(
            model=run.model,
            architecture=run.architecture,
            dtype=run.dtype,
            device=run.device,
            prompt=run.prompt_text,
            prompt_tokens=len(run.prompt_tokens),
            max_new_tokens=run.max_new_tokens,
            from_run=None,
            kept_steps=None,
            notes=notes_on(self.planned, run.notes),
            rows=tuple(self._rows),
            summary=summed_up(self._rows),
            seconds=self._seconds,
            complete=len(self._rows) == len(self.planned)
            and all(row.finish_reason in ("stop", "length") for row in self._rows),
        )

    def _decode(self, batch: Sequence[PlannedRow], reading: Progress | None) -> Generator[int]:
        """Decode some rows; yields the number of tokens so far."""
        mark = time.perf_counter()
        prompts, params = [self._prompt] * len(batch), [planned.params for planned in batch]
        options = replace(self._options, reuse_cache=bool(self._rows))  # what the batch before read of the prompt
        live = self._session.side_by_side(prompts, params, options, reading)
        self._traces, parted = live.traces, dict[int, Tensor]()
        try:
            for count, (row, step) in enumerate(live.steps(), 1):
                if row == 0 and not self._rows:
                    self._first.append(step.token_id)
                elif row not in parted and step.token_id != self._first[step.step]:
                    parted[row] = _raw_logits(live)
                self._seconds += time.perf_counter() - mark
                yield count
                mark = time.perf_counter()
        finally:
            live.finish("interrupted")  # says nothing where the rows have ended
            self._keep(batch, parted)

    def _keep(self, batch: Sequence[PlannedRow], parted: Mapping[int, Tensor]) -> None:
        """Make rows of what was decoded; `parted` holds the raw logits at which a row left the first one."""
        replay = Replay()  # one a batch: it holds a vocabulary of numbers for each seed
        for row, (planned, trace) in enumerate(zip(batch, self._traces, strict=True)):
            path = trace.path()
            parting = self._parting(planned, path, parted[row], replay) if row in parted else None
            course = Course(path, trace.text, trace.end.finish_reason if trace.end else None, parting)
            self._rows.append(row_of(planned, course, lambda token_id: self._session.spell(token_id)[0]))

    def _parting(self, planned: PlannedRow, path: Sequence[Step], raw: Tensor, replay: Replay) -> Parting:
        at = common_length([step.token_id for step in path], self._first)
        junction = Junction(raw, self._prompt.ids, self._first[:at], replay)
        first = Chosen(self._first[at], self.planned[0].params)
        return junction.explain(first, Chosen(path[at].token_id, planned.params))


def _raw_logits(live: LiveRun) -> Tensor:
    """Those of the newest token, [V]; not a view of a whole batch's."""
    if live.newest is None:
        raise ValueError("nothing was decoded yet")
    return live.newest.choice.raw.clone()


def _options(options: RunOptions, rows: int) -> RunOptions:
    """The options of one batch: candidates are recorded where they are saved."""
    if options.save is None:
        return replace(options, candidates=1)
    return replace(options, save=Path(options.save) / "0000") if rows == 1 else options  # the layout of a batch
