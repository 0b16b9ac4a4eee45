"""Other settings on the stored raw logits of a run, without the model: exact while the tokens are the run's.

The logits behind a token are known only where all tokens before it are the run's. So each row follows the run and
ends where it would first choose another token: which one that is, is still exact, what follows is not known.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from decodescope.errors import InputError
from decodescope.experiments.sample_grid import Grid, PlannedRow, needs_checkpoint, settle
from decodescope.experiments.sample_parting import Chosen, Junction, Replay
from decodescope.experiments.sample_records import Parting, SampleReport, SampleRow
from decodescope.experiments.sample_rows import Course, notes_on, row_of, summed_up
from decodescope.sampling.checkpoint import read_checkpoint_settings
from decodescope.sampling.params import SamplingParams, resolve
from decodescope.text.tokenizer import Tokenizer, open_tokenizer
from decodescope.trace.kept_logits import KeptLogits, kept_logits
from decodescope.trace.records import Run
from decodescope.trace.saved import read_trace


@dataclass(frozen=True, slots=True)
class _Way:
    """How far a row follows the run; the token it leaves it with and the raw logits [V] behind which it does."""

    exact: int
    leaves: tuple[int, Tensor] | None = None


def reroll(folder: Path, grid: Grid, from_checkpoint: bool = False) -> SampleReport:
    """Re-roll a run saved with `--keep logits`. No weights are read; what the checkpoint says of sampling and the
    names of tokens come from the model's folder where they are needed and it is still there.

    Raises InputError for a run without logits, as `read_trace` does, and as `settle` does.
    """
    started = time.perf_counter()
    run = SavedRun(folder)
    planned = settle(grid, _checkpoint(run.header, grid, from_checkpoint), from_checkpoint)
    rows = run.rows(planned)
    return SampleReport(
        model=run.header.model,
        architecture=run.header.architecture,
        dtype=run.header.dtype,
        device=run.header.device,
        prompt=run.header.prompt_text,
        prompt_tokens=len(run.prompt),
        max_new_tokens=run.header.max_new_tokens,
        from_run=str(folder),
        kept_steps=run.kept_steps,
        notes=notes_on(planned),
        rows=rows,
        summary=summed_up(rows),
        seconds=time.perf_counter() - started,
        complete=True,
    )


class SavedRun:
    """A run on disk with raw logits. Raises InputError where it has none of its first step."""

    def __init__(self, folder: Path) -> None:
        trace = read_trace(folder)
        self.header: Run = trace.run
        self.prompt = [token.token_id for token in trace.run.prompt_tokens]
        self._path, self._end = trace.path(), trace.end
        self._ids = [step.token_id for step in self._path]
        self._logits: KeptLogits = kept_logits(folder)
        self._params, self._replay = resolve(trace.run.sampling), Replay()
        if not self.kept_steps:
            raise InputError("sample.no_logits", path=folder)

    @cached_property
    def kept_steps(self) -> int:
        """How many steps have their logits, from the first on."""
        missing = (place for place, step in enumerate(self._path) if step.node not in self._logits)
        return next(missing, len(self._path))

    def rows(self, planned: Sequence[PlannedRow]) -> tuple[SampleRow, ...]:
        """The rows of other settings, as far as they are known."""
        ways = self._followed([each.params for each in planned])
        return tuple(self._row(each, way) for each, way in zip(planned, ways, strict=True))

    def _followed(self, params: Sequence[SamplingParams]) -> list[_Way]:
        """How far each row goes; a step's logits are read once for all."""
        left: dict[int, _Way] = {}
        for place, step in enumerate(self._path[: self.kept_steps]):
            following = [row for row in range(len(params)) if row not in left]
            if not following:
                break
            raw, past = torch.from_numpy(self._logits[step.node]), self._ids[:place]
            for row in following:
                token_id = self._replay.choose(raw, self.prompt, past, params[row]).token_id
                if token_id != step.token_id:
                    left[row] = _Way(place, (token_id, raw))
        return [left.get(row, _Way(self.kept_steps)) for row in range(len(params))]

    def _row(self, planned: PlannedRow, way: _Way) -> SampleRow:
        steps, end = self._path[: way.exact], self._end
        if end is not None and way.exact == len(self._path):
            return row_of(planned, Course(steps, end.text, end.finish_reason, None, way.exact), self._name)
        text = "".join(step.delta_text for step in steps)
        return row_of(planned, Course(steps, text, None, self._parting(planned, way), way.exact), self._name)

    def _parting(self, planned: PlannedRow, way: _Way) -> Parting | None:
        if way.leaves is None:
            return None
        token_id, raw = way.leaves
        left = self._path[way.exact]
        junction = Junction(raw, self.prompt, self._ids[: way.exact], self._replay)
        return junction.explain(Chosen(left.token_id, self._params, left.forced), Chosen(token_id, planned.params))

    def _name(self, token_id: int) -> str | None:
        """A token's text: from the run where it was seen, else from the model's tokenizer where that is there."""
        return self._seen.get(token_id) or (self._tokenizer.token_text(token_id) if self._tokenizer else None)

    @cached_property
    def _seen(self) -> dict[int, str]:
        return {each.token_id: each.text for step in self._path for each in step.candidates}

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return open_tokenizer(Path(self.header.path))
        except InputError:
            return None


def _checkpoint(run: Run, grid: Grid, from_checkpoint: bool) -> dict[str, object]:
    """What the checkpoint says of sampling, where the grid asks. Raises InputError where its files are gone."""
    if not (from_checkpoint or needs_checkpoint(grid)):
        return {}
    if not Path(run.path).exists():
        raise InputError("sample.no_checkpoint", path=run.path)
    return read_checkpoint_settings(Path(run.path))
