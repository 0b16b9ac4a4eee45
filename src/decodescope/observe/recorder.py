"""RowRecorder: one row's way from Decoded to the trace: names, text, tree, disk, and how it ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decodescope.errors import DecodescopeError
from decodescope.generate import Decoded
from decodescope.observe.clock import peak_rss_bytes
from decodescope.observe.recording import Recording
from decodescope.observe.summary import Spelling, summarise
from decodescope.text.stream import StopStrings, TextStream
from decodescope.text.tokenizer import Tokenizer
from decodescope.trace.records import End, FinishReason, Kv, Memory, Run, Step, Timing, Trace, end_of
from decodescope.trace.store import TraceWriter


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured around one step; shared by all rows of a batch."""

    kv: Kv
    forward_s: float
    sample_s: float
    memory: Memory


def speller(tokenizer: Tokenizer) -> Spelling:
    """Text and bytes of ids, each looked up once."""
    known: dict[int, tuple[str, str]] = {}

    def spell(token_id: int) -> tuple[str, str]:
        if token_id not in known:
            known[token_id] = (tokenizer.token_text(token_id), tokenizer.token_bytes(token_id).hex())
        return known[token_id]

    return spell


class RowRecorder:
    """Records one sequence; with a writer each step is committed before it is returned."""

    def __init__(
        self, run: Run, tokenizer: Tokenizer, spell: Spelling, candidates: int, writer: TraceWriter | None
    ) -> None:
        self.trace = Trace(run)
        self._tokenizer, self._spell, self._candidates, self._writer = tokenizer, spell, candidates, writer
        self._path: list[Step] = []  # from the root to the newest step
        self._start_text(run.stop_strings)

    @property
    def path(self) -> Sequence[Step]:
        """The steps of the branch being decoded."""
        return self._path

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached, if any."""
        return self._stop.found

    def record(self, decoded: Decoded, measured: Measured, keep_logits: bool = False) -> Step:
        """Make and commit the step of one Decoded.

        Raises ResourceError when the disk is full.
        """
        started = time.perf_counter()
        summary = summarise(decoded.choice, self._candidates, self._spell)
        text, bytes_hex = self._spell(decoded.choice.token_id)
        step = Step(
            step=decoded.step,
            position=decoded.position,
            token_id=decoded.choice.token_id,
            bytes_hex=bytes_hex,
            text=text,
            delta_text=self._push(decoded.choice.token_id, bool(decoded.ended)),
            node=len(self.trace.steps),
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
            forced=decoded.choice.forced,
        )
        if self._writer:
            self._writer.write(step)
            if keep_logits:
                self._writer.write_tensors({"logits": decoded.choice.raw}, step.node)
        self.trace.steps.append(step)
        self._path.append(step)
        return step

    def save_inner(self, step: int, recording: Recording) -> None:
        """Save what was looked at in the passes that lead to `step`; tensors that lie on disk leave the memory.

        Does nothing without a writer. Raises ResourceError when the disk is full.
        """
        if self._writer is None:
            return
        node = len(self.trace.steps)
        self._writer.write_sites(recording.summaries_of(step), node)
        entries = self._writer.write_tensors(recording.kept.of_step(step), node)
        recording.kept.saved(step, self._writer.folder, entries)

    def back_to(self, step: int) -> None:
        """Leave the branch: what follows hangs on the token before `step`. Recorded steps stay in the tree."""
        del self._path[step:]
        self._start_text(self.trace.run.stop_strings)
        for earlier in self._path:
            self._push(earlier.token_id, last=False)

    def end(self, reason: FinishReason, error: DecodescopeError | None = None) -> End:
        """Write and return the end record; a second call returns the first one's."""
        if self.trace.end is None:
            self.trace.end = self._end(reason, error)
            if self._writer:
                self._writer.finish(self.trace.end)
        return self.trace.end

    def _start_text(self, stop_strings: tuple[str, ...]) -> None:
        self._stream = TextStream(self._tokenizer)
        self._stop = StopStrings(stop_strings)

    def _push(self, token_id: int, last: bool) -> str:
        text = self._stop.push(self._stream.push(token_id))
        return text + self._flush() if last else text

    def _flush(self) -> str:
        return self._stop.push(self._stream.flush()) + self._stop.flush()

    def _end(self, reason: FinishReason, error: DecodescopeError | None) -> End:
        text = "".join(step.delta_text for step in self._path) + self._flush()
        said = None if error is None else str(error)
        end = end_of(self.trace.run, self._path, reason, text, self.stop_string, said)
        folder = str(self._writer.folder) if self._writer else None
        return replace(end, peak_rss_bytes=peak_rss_bytes(), trace=folder)


def _timing(measured: Measured, summary_s: float) -> Timing:
    """`total_s` is forward, sampling and summing up; writing to disk and drawing are not in it."""
    return Timing(measured.forward_s, measured.sample_s, measured.forward_s + measured.sample_s + summary_s)
