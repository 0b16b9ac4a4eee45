"""LiveRun: rows being decoded and recorded, step by step; a single row can be changed and taken back."""

from collections.abc import Callable, Iterator, Sequence

import torch

from decodescope.errors import DecodescopeError, ResourceError
from decodescope.generate import Decoded, Decoding
from decodescope.observe.clock import Stopwatch, memory_now
from decodescope.observe.recorder import Measured, RowRecorder
from decodescope.trace.records import FinishReason, Kv, Step, Trace


class LiveRun:
    """Iterate `steps()`; between two of them call `replace` or `back`. Ends are written when rows end.

    Whatever interrupts it (Ctrl-C, no memory, a full disk), every committed step stays readable.
    """

    def __init__(self, decoding: Decoding, recorders: Sequence[RowRecorder], keep_logits: bool = False) -> None:
        self._decoding, self._recorders, self._keep_logits = decoding, recorders, keep_logits
        self._watch = Stopwatch(decoding.model.lm_head.weight.device)
        self._newest: Decoded | None = None
        self._measured: Measured | None = None

    @property
    def traces(self) -> list[Trace]:
        """The trace of every row, as far as it has come."""
        return [recorder.trace for recorder in self._recorders]

    def text_so_far(self, row: int = 0) -> str:
        """The text of the row's present branch."""
        return "".join(step.delta_text for step in self._recorders[row].path)

    def steps(self) -> Iterator[tuple[int, Step]]:
        """Decode until every row has ended; yields (row, step), each committed before it is shown.

        Raises ResourceError when memory or disk run out and FindingError for non-finite logits; the ends of
        all rows are written first.
        """
        try:
            while self._decoding.active:
                yield from self._turn()
        except DecodescopeError as error:
            self.finish("error", error)
            raise
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            fault = self._out_of_memory()
            self.finish("error", fault)
            raise fault from None
        self.finish("length")  # rows that were left without an end; none in an ordinary run

    def replace(self, token_id: int) -> Step:
        """Choose `token_id` instead of the newest token; the token it replaces stays in the tree as a leaf."""
        if self._newest is None or self._measured is None:
            raise ValueError("no token to replace yet")
        recorder = self._recorders[0]
        recorder.trace.end = None
        recorder.back_to(self._newest.step)
        self._newest = self._decoding.replace(self._newest, token_id)
        return recorder.record(self._newest, self._measured, self._keep_logits)

    def back(self) -> Step:
        """Take the newest token back and stand again at the step before it (at the first step: there).

        That step is not recorded twice; its logits are computed again so that it can be changed.
        """
        recorder = self._recorders[0]
        at = max(len(recorder.path) - 2, 0)
        recorder.back_to(at + 1)
        step = recorder.path[at]
        self._decoding.rewind(at)
        self._decoding.forward()
        (decoded,) = self._decoding.choose()
        if decoded.choice.token_id != step.token_id:
            decoded = self._decoding.replace(decoded, step.token_id)
        self._newest = decoded
        return step

    def finish(self, reason: FinishReason, error: DecodescopeError | None = None) -> None:
        """Write the end of every row that has none."""
        for recorder in self._recorders:
            recorder.end(reason, error)

    def _turn(self) -> Iterator[tuple[int, Step]]:
        with self._watch.section("forward"):
            self._decoding.forward()
        kv_of = self._kv()
        with self._watch.section("sample"):
            choices = self._decoding.choose()
        seconds, memory = self._watch.seconds, memory_now(self._watch.device)
        for decoded in choices:
            self._measured = Measured(kv_of(decoded.position), seconds["forward"], seconds["sample"], memory)
            self._newest = decoded
            yield decoded.row, self._recorded(decoded, self._measured)
            self._end_if_due()

    def _kv(self) -> Callable[[int], Kv]:
        """What each row holds of the cache, measured before rows that end leave it.

        A row's tokens and bytes leave its padding out; what is allocated is its share of the buffers.
        """
        cache, rows = self._decoding.cache, len(self._decoding.active)
        each, allocated, cached = (
            cache.position_bytes,
            cache.allocated_bytes // rows,
            self._decoding.limits.use_cache,
        )
        return lambda tokens: Kv(tokens * cached, tokens * cached * each, allocated)

    def _recorded(self, decoded: Decoded, measured: Measured) -> Step:
        recorder = self._recorders[decoded.row]
        step = recorder.record(decoded, measured, self._keep_logits)
        if recorder.stop_string is not None:
            self._decoding.drop({decoded.row})
        return step

    def _end_if_due(self) -> None:
        """Write the end of a row that has reached one; called after the reader had a chance to change it."""
        decoded = self._newest
        if decoded is None:
            return
        recorder = self._recorders[decoded.row]
        if recorder.stop_string is not None:
            recorder.end("stop")
        elif decoded.ended:
            recorder.end(decoded.ended)

    def _out_of_memory(self) -> ResourceError:
        model, cache = self._decoding.model, self._decoding.cache
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return ResourceError("memory.running", weights=weights, cache=cache.allocated_bytes, tokens=cache.length)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "allocate memory" in str(error) or "not enough memory" in str(error)
