"""LiveRun: rows being decoded and recorded, step by step; a single row can be changed and taken back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from decodescope.analysis.guards import Guards
from decodescope.analysis.metrics import recent_text
from decodescope.errors import DecodescopeError, ResourceError
from decodescope.generate import Decoded, Decoding, Past
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes, is_out_of_memory
from decodescope.model.placement import devices_of
from decodescope.observe.clock import Stopwatch, memory_now
from decodescope.observe.recorder import Measured, RowRecorder
from decodescope.observe.recording import Recording
from decodescope.trace.records import FinishReason, Intervention, Kv, Step, Trace


class LiveRun:
    """Iterate `steps()`; between two of them call `replace`, `force` or `back`. Ends are written when rows end.

    Guards, one set for each row or none, see every step before it is committed and may end its row or change
    its temperature. Whatever interrupts the run (Ctrl-C, no memory, a full disk), every committed step stays
    readable.
    """

    def __init__(
        self,
        decoding: Decoding,
        recorders: Sequence[RowRecorder],
        guards: Sequence[Guards] = (),
        recording: Recording | None = None,
    ) -> None:
        self._decoding, self._recorders = decoding, recorders
        self._recording = recording
        self._watch, self._devices = Stopwatch(decoding.model.device), devices_of(decoding.model)
        self._read_s = 0.0  # of reading a prompt ahead
        self._newest: Decoded | None = None
        self._measured: Measured | None = None
        self._reins = [Reins(decoding, row, each) for row, each in enumerate(guards)]
        for reins, recorder in zip(self._reins, recorders, strict=False):
            reins.catch_up(recorder.path)  # with a fork's past
        self.reused_tokens = decoding.cache.length  # that an earlier run had computed

    @property
    def traces(self) -> list[Trace]:
        """The trace of every row, as far as it has come."""
        return [recorder.trace for recorder in self._recorders]

    @property
    def cache(self) -> KVCache:
        """What holds the keys and values now, to be measured."""
        return self._decoding.cache

    @property
    def decoding(self) -> Decoding:
        """The sequences themselves, for a pass together with others' (`batching.forward_together`)."""
        return self._decoding

    @property
    def newest(self) -> Decoded | None:
        """The token that `steps` yielded last, with the logits it was chosen from."""
        return self._newest

    def recent_text(self, row: int = 0) -> str:
        """The last characters of the row's present branch (see `analysis.metrics.recent_text`)."""
        return recent_text(self._recorders[row].path)

    def steps(self) -> Iterator[tuple[int, Step]]:
        """Decode until every row has ended; yields (row, step), each committed before it is shown.

        Raises ResourceError when memory or disk run out and FindingError for non-finite logits; the ends of
        all rows are written first, also when the reader stops reading.
        """
        with self._ending():
            while self._decoding.active:
                yield from self._taken(self._advance())
        self.close()

    def read_chunk(self) -> bool:
        """Read a chunk of a long prompt ahead of the first step; False where what is left is that step's own.

        The time it takes is the first step's. Raises ResourceError when memory runs out.
        """
        with self._ending():
            with self._watch.section("forward"):
                more = self._decoding.read_chunk()
            self._read_s += self._watch.seconds["forward"] if more else 0.0
        return more

    def turn(self, forward_s: float | None = None) -> Iterator[tuple[int, Step]]:
        """The next step of every row; where its pass was made together with others', that took `forward_s`.

        Raises as `steps` does.
        """
        with self._ending():
            yield from self._taken(self._advance(together_s=forward_s))

    def _taken(self, steps: Sequence[tuple[Decoded, Measured]]) -> Iterator[tuple[int, Step]]:
        """Steps recorded one after the other; the reader may change each before its row can end with it."""
        for decoded, measured in steps:
            self._newest, self._measured = decoded, measured
            yield decoded.row, self._recorded(decoded, measured)
            self._end_if_due()

    def close(self) -> None:
        """Let go of the run folders."""
        for recorder in self._recorders:
            recorder.close()

    def replace(self, token_id: int) -> Step:
        """Choose `token_id` instead of the newest token; the token it replaces stays in the tree as a leaf.

        Raises ValueError where there is no token to replace and InputError for an id that the model lacks.
        """
        recorder = self._recorders[0]
        if self._newest is None or self._measured is None or recorder.trace.end is not None:
            raise ValueError("there is no newest token to replace")
        changed = self._decoding.replace(self._newest, token_id)
        with self._ending():
            recorder.back_to(changed.step)
            for reins in self._reins:
                reins.forget_from(changed.step)
            self._newest = changed
            return self._recorded(changed, self._measured)

    def force(self, token_ids: Sequence[int], row: int = 0) -> None:
        """Lay down the next tokens of a row. Raises InputError for an id that the model lacks."""
        self._decoding.force(row, token_ids)

    def past(self) -> Past:
        """What the run has come to, for another to go on from; of a batch what all its rows began with."""
        return self._decoding.past()

    def back(self) -> Step:
        """Take the newest token back and stand again at the step before it (at the first step: there).

        That step is not recorded twice; its logits are computed again so that it can be changed. Raises
        ValueError where there is no step to stand at.
        """
        recorder = self._recorders[0]
        if not recorder.path or recorder.trace.end is not None:
            raise ValueError("there is no step to go back to")
        at = max(len(recorder.path) - 2, 0)
        with self._ending():
            step = recorder.path[at]
            recorder.back_to(at + 1)
            self._decoding.rewind(at)
            if self._recording:
                self._recording.forget_from(at + 1)
            for reins in self._reins:  # it is chosen at the temperature of the first time
                reins.forget_from(at)
            # What the step showed and cost is what it did the first time.
            ((decoded, _),) = self._advance(looking=False)
            for reins in self._reins:
                reins.judge(step)
            self._measured = Measured(step.kv, step.timing.forward_s, step.timing.sample_s, step.memory)
            if decoded.choice.token_id != step.token_id:
                decoded = self._decoding.replace(decoded, step.token_id)
            self._newest = decoded
            return step

    def finish(self, reason: FinishReason, error: DecodescopeError | None = None) -> None:
        """Write the end of every row that has none; one full disk does not keep the others from theirs."""
        for recorder in self._recorders:
            with suppress(ResourceError):
                recorder.end(reason, error)
        self.close()  # not before: the rows of a fork have one folder

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever stops the work inside, the ends are written before it goes on its way."""
        try:
            yield
        except DecodescopeError as error:
            self.finish("error", error)
            raise
        except (KeyboardInterrupt, GeneratorExit):
            self.finish("interrupted")
            raise
        except Exception as error:
            fault = self._out_of_memory() if is_out_of_memory(error) else None
            self.finish("error", fault)
            if fault is None:
                raise
            raise fault from None

    def _advance(self, looking: bool = True, together_s: float | None = None) -> list[tuple[Decoded, Measured]]:
        """One turn of the loop, measured: forward (unless made already), then a choice for every active row."""
        if together_s is None:
            with self._looking() if looking else nullcontext(), self._watch.section("forward"):
                self._decoding.forward()
        forward_s = self._read_s + (self._watch.seconds["forward"] if together_s is None else together_s)
        self._read_s, held = 0.0, self._held()
        with self._watch.section("sample"):
            choices = self._decoding.choose()
        sample_s, memory = self._watch.seconds["sample"], memory_now(*self._devices)
        return [(d, Measured(held[d.row], forward_s, sample_s, memory)) for d in choices]

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """What the passes inside show belongs to the step they lead to, and is saved before its choice."""
        decoding, recorder, recording = self._decoding, self._recorders[0], self._recording
        if recording is None:
            yield
            return
        step = len(recorder.path)
        decoding.tap = recording.begin(step, *decoding.next_pass(), decoding.limits.every_logit)
        yield
        if decoding.tap is not None:
            decoding.tap = None
            recording.end()
            recorder.save_inner(step, recording)

    def _held(self) -> dict[int, Kv]:
        """What each row holds of the cache, before rows that end leave it: its tokens without padding, its bytes,
        and its share of what is allocated."""
        cache, tokens = self._decoding.cache, self._decoding.cached_tokens()
        allocated = cache.allocated_bytes // len(tokens)
        return {row: Kv(count, count * cache.position_bytes, allocated) for row, count in tokens.items()}

    def _recorded(self, decoded: Decoded, measured: Measured) -> Step:
        recorder = self._recorders[decoded.row]
        judge = self._reins[decoded.row].judge if self._reins else None
        step = recorder.record(decoded, measured, judge)
        if recorder.stop_string is not None or self._stopped(decoded.row):
            self._decoding.drop({decoded.row})
        return step

    def _stopped(self, row: int) -> bool:
        """Whether a guard has stopped the row."""
        return bool(self._reins) and self._reins[row].stopped

    def _end_if_due(self) -> None:
        """Write the end of a row that has reached one; called after the reader had a chance to change it."""
        decoded = self._newest
        if decoded is None:
            return
        recorder = self._recorders[decoded.row]
        if recorder.stop_string is not None or self._stopped(decoded.row):
            recorder.end("stop")
        elif decoded.ended:
            recorder.end(decoded.ended)

    def _out_of_memory(self) -> ResourceError:
        cache, weights = self._decoding.cache, held_bytes(self._decoding.model)
        return ResourceError("memory.running", weights=weights, cache=cache.allocated_bytes, tokens=cache.length)


class Reins:
    """The guards of one row have the sampler in hand: what they say is in force from the next step on."""

    def __init__(self, decoding: Decoding, row: int, guards: Guards) -> None:
        self._decoding, self._row, self._guards = decoding, row, guards
        self._base = decoding.temperature(row)
        self.stopped = False

    def judge(self, step: Step) -> tuple[Intervention, ...]:
        """What is done about a step; a new temperature is in force at once."""
        acted = self._guards.see(step, self._temperature)
        self.stopped |= any(each.action == "stop" for each in acted)
        self._temper()
        return acted

    def catch_up(self, path: Sequence[Step]) -> None:
        """See steps that were made before; where one would have been the last, it was not."""
        for step in path:
            self.judge(step)
        self.stopped = False

    def forget_from(self, step: int) -> None:
        """As if the steps from `step` on had not been seen."""
        self._guards.forget_from(step)
        self.stopped = False
        self._temper()

    @property
    def _temperature(self) -> float:
        known = self._guards.temperature
        return self._base if known is None else known

    def _temper(self) -> None:
        self._decoding.temper(self._row, self._temperature)
