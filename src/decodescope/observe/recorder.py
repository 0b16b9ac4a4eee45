"""RowRecorder: one row's way from Decoded to the trace: names, text, tree, disk, and how it ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from decodescope.errors import DecodescopeError
from decodescope.generate import Decoded
from decodescope.observe.clock import peak_rss_bytes
from decodescope.observe.recording import Recording
from decodescope.observe.summary import summarise
from decodescope.text.stream import StopStrings, TextStream
from decodescope.text.tokenizer import Tokenizer
from decodescope.trace.ends import end_of, of_fork
from decodescope.trace.folder import refuse_used
from decodescope.trace.records import (
    Branch,
    End,
    FinishReason,
    Intervention,
    Kv,
    Memory,
    Run,
    Setting,
    Step,
    Timing,
    Trace,
)
from decodescope.trace.store import TraceWriter

Judge = Callable[[Step], tuple[Intervention, ...]]  # what guards do about a step


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured around one step; shared by all rows of a batch."""

    kv: Kv
    forward_s: float
    sample_s: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Detail:
    """How much of a step is kept. Logits only up to a number of bytes, and only in a run folder."""

    candidates: int
    stage_probs: bool = False
    logits_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Graft:
    """Where a fork grows: on the trace of an earlier run, its first own step being `step`."""

    onto: Trace
    step: int
    settings: tuple[Setting, ...] = ()  # what differs from the run's


class Speller:
    """Text and bytes of ids, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, str]] = {}

    def __call__(self, token_id: int) -> tuple[str, str]:
        """Text, and bytes in hexadecimal."""
        if token_id not in self._known:
            known = self.tokenizer.token_text(token_id), self.tokenizer.token_bytes(token_id).hex()
            self._known[token_id] = known
        return self._known[token_id]


class RowRecorder:
    """Records one sequence; with a writer each step is committed before it is returned."""

    def __init__(
        self, run: Run, spell: Speller, detail: Detail, writer: TraceWriter | None, graft: Graft | None = None
    ) -> None:
        self.trace = Trace(run)
        self._spell, self._detail, self._writer, self._graft = spell, detail, writer, graft
        self._logits_left = detail.logits_bytes
        self._started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._path: list[Step] = []  # from the root to the newest step
        if graft:
            # The fork's nodes stand in the same tree as the run's.
            self.trace.steps, self.trace.branches = graft.onto.steps, graft.onto.branches
            self.trace.root = graft.onto.root or graft.onto.run
            self._path = graft.onto.path()
        self.back_to(graft.step if graft else 0)

    @property
    def path(self) -> Sequence[Step]:
        """The steps of the branch being decoded."""
        return self._path

    @property
    def _next_node(self) -> int:
        known = self.trace.steps[-1].node + 1 if self.trace.steps else 0
        return max(known, self._writer.next_node) if self._writer else known

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached, if any."""
        return self._stop.found

    def record(self, decoded: Decoded, measured: Measured, judge: Judge | None = None) -> Step:
        """Make and commit the step of one Decoded.

        Raises ResourceError when the disk is full.
        """
        started = time.perf_counter()
        choice = decoded.choice
        summary = summarise(choice, self._detail.candidates, self._spell, self._detail.stage_probs)
        text, bytes_hex = self._spell(choice.token_id)
        step = Step(
            step=decoded.step,
            position=decoded.position,
            token_id=choice.token_id,
            bytes_hex=bytes_hex,
            text=text,
            delta_text=self._push(choice.token_id, bool(decoded.ended)),
            node=self._next_node,
            parent=self._path[-1].node if self._path else None,
            rank=summary.rank,
            logprob_nats=summary.logprob_nats,
            prob=summary.prob,
            prob_final=summary.prob_final,
            entropy_nats=summary.entropy_nats,
            margin_logits=summary.margin_logits,
            candidates=summary.candidates,
            stages=summary.stages,
            kv=measured.kv,
            timing=_timing(measured, time.perf_counter() - started),
            memory=measured.memory,
            forced=choice.forced,
            mass_above=summary.mass_above,
        )
        if judge and (acted := judge(step)):
            step = replace(step, interventions=acted)
        self._commit(step, decoded)
        self.trace.steps.append(step)
        self._path.append(step)
        return step

    def save_inner(self, step: int, recording: Recording) -> None:
        """Save what was looked at in the passes that lead to `step`; tensors that lie on disk leave the memory.

        Does nothing without a writer. Raises ResourceError when the disk is full.
        """
        if self._writer is None:
            return
        node = self._next_node
        self._writer.write_sites(recording.summaries_of(step), node)
        entries = self._writer.write_tensors(recording.kept.of_step(step), node)
        recording.kept.saved(step, self._writer.folder, entries)

    def _commit(self, step: Step, decoded: Decoded) -> None:
        if self._writer is None:
            return
        self._writer.write(step)
        raw = decoded.choice.raw
        if raw.nbytes <= self._logits_left:
            self._logits_left -= raw.nbytes
            self._writer.write_tensors({"logits": raw}, step.node)

    def back_to(self, step: int) -> None:
        """Leave the branch: what follows hangs on the token before `step`. Recorded steps stay in the tree."""
        del self._path[step:]
        self._stream = TextStream(self._spell.tokenizer)
        self._stop = StopStrings(self.trace.run.stop_strings)
        for earlier in self._path:
            self._push(earlier.token_id, last=False)

    def end(self, reason: FinishReason, error: DecodescopeError | None = None) -> End:
        """Write and return the end record; a second call returns the first one's."""
        if self.trace.end is None:
            self.trace.end = end = self._end(reason, error)
            if self._graft:
                branch = Branch(self._graft.step, self._graft.settings, self._started_at, end)
                self.trace.branches.append(branch)
                if self._writer:
                    self._writer.write_branch(branch)
            elif self._writer:
                self._writer.finish(end)
        return self.trace.end

    def close(self) -> None:
        """Let go of the run folder."""
        if self._writer:
            self._writer.close()

    def _push(self, token_id: int, last: bool) -> str:
        text = self._stop.push(self._stream.push(token_id))
        return text + self._flush() if last else text

    def _flush(self) -> str:
        return self._stop.push(self._stream.flush()) + self._stop.flush()

    def _end(self, reason: FinishReason, error: DecodescopeError | None) -> End:
        text = "".join(step.delta_text for step in self._path) + self._flush()
        said = None if error is None else str(error)
        end = end_of(self.trace.run, self._path, reason, text, self.stop_string, said)
        if self._graft:
            end = of_fork(end, self.trace.run, self._path, self._graft.step)
        folder = str(self._writer.folder) if self._writer else None
        return replace(end, peak_rss_bytes=peak_rss_bytes(), trace=folder)


def _timing(measured: Measured, summary_s: float) -> Timing:
    """`total_s` is forward, sampling and summing up; writing to disk and drawing are not in it."""
    return Timing(measured.forward_s, measured.sample_s, measured.forward_s + measured.sample_s + summary_s)


def row_recorders(
    runs: Sequence[Run], spell: Speller, detail: Detail, save: Path | str | None
) -> list[RowRecorder]:
    """A recorder for each row. With `save` one run lies in that folder, each of several in a numbered one inside.

    Raises InputError as `TraceWriter.create` does.
    """
    folder = None if save is None else Path(save)
    if folder is not None and len(runs) > 1:
        refuse_used(folder)
    one = len(runs) == 1
    writers = [
        None if folder is None else TraceWriter.create(folder if one else folder / f"{row:04d}", run)
        for row, run in enumerate(runs)
    ]
    return [RowRecorder(run, spell, detail, writer) for run, writer in zip(runs, writers, strict=True)]
