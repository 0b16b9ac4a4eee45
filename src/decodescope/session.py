"""Session: an open model that runs. Wires text, model, sampling and observers; no arithmetic of its own."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from decodescope.analysis.guard_rules import parse_guard
from decodescope.analysis.guards import Guards
from decodescope.errors import InputError
from decodescope.forking import forked_options, plan_fork
from decodescope.generate import NOTHING, Decoding, Limits, Past
from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress
from decodescope.observe.description import describe_run, for_row
from decodescope.observe.recorder import Graft, RowRecorder, row_recorders
from decodescope.observe.recording import DEFAULT_BUDGET, Recording, Watch
from decodescope.open_model import OpenModel
from decodescope.options import RunOptions, changed, guarded
from decodescope.sampling.draw import DrawStream
from decodescope.sampling.params import SamplingParams, resolve
from decodescope.sampling.sampler import Sampler
from decodescope.text.chat import Prompt
from decodescope.trace.records import Trace
from decodescope.trace.store import TraceWriter


class Session(OpenModel):
    """A loaded model with its tokenizer. `Session.open("starter")`, then `run`."""

    _recording: Recording | None = None  # of the next run
    _newest: Decoding | None = None  # what others may go on from; no trace, which would keep us alive in a circle

    def run(self, prompt: str | Prompt, *, options: RunOptions | None = None, **changes: Any) -> Trace:
        """Decode one prompt to its end. Sampling values and options may be given by name:
        `run("春天", temperature=0.7, max_new_tokens=8)`."""
        ready = self.prompt(prompt) if isinstance(prompt, str) else prompt
        return self._finished(self.start([ready], changed(options or RunOptions(), changes)))

    def fork(self, trace: Trace, step: int, token: str | int | None = None, **changes: Any) -> Trace:
        """Go back to a step of a run and on from there with another token: the trace of the new branch.

        `token` is an id or the text of one token; None lets the sampler choose. The branch stands in the same
        tree (`steps`, `branches`) and run folder as the run, and goes on under its settings, but for `changes`,
        to its number of tokens or for `max_new_tokens` of its own. A session keeps the cache of its newest run:
        forking that one reads nothing again. Raises InputError.
        """
        start = () if token is None else (self.token_id(token),)
        return self._finished(self.grow(trace, step, [start], changed(forked_options(trace, step), changes)))

    def start(self, prompts: Sequence[Prompt], options: RunOptions, progress: Progress | None = None) -> LiveRun:
        """Prepare a run of one prompt, or of several as one batch. Raises InputError before any work is done.

        `progress` is told (positions done, positions in all) while a long prompt is read.
        """
        return self.side_by_side(prompts, [self.params(options)] * len(prompts), options, progress)

    def params(self, options: RunOptions) -> SamplingParams:
        """The sampling settings that options mean with this model. Raises InputError."""
        given = resolve(options.sampling, self.settings if options.checkpoint_settings else None)
        return guarded(given, options.guards)

    def side_by_side(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        options: RunOptions,
        progress: Progress | None = None,
    ) -> LiveRun:
        """Prepare one batch whose row i has prompt i and sampling settings i, whatever the options say of those.

        Equal prompts are read once, and their rows share that cache. Raises InputError before any work is done.
        """
        room, recording = self.room([prompt.ids for prompt in prompts]), self._taken_recording(len(prompts))
        limits = self._limits(options, min(options.max_new_tokens, room))
        past = replace(self._newest.past(), generated=()) if self._newest and options.reuse_cache else NOTHING
        self._newest = None  # its memory is free before the next run's is taken
        decoding, samplers = self._decoding([prompt.ids for prompt in prompts], params, limits, past)
        notes = ("note.context_limit",) * (room < options.max_new_tokens) + ("note.observed",) * bool(recording)
        common = describe_run(self.files, self.model, limits, options.stop, self.notes + notes)
        runs = [for_row(common, *row, options.guards) for row in zip(prompts, samplers, strict=True)]
        recorders = row_recorders(runs, self.spell, options.detail, options.save)
        self._newest = decoding
        return self._live(decoding, recorders, options, recording, progress)

    def join(self, prompt: Prompt, options: RunOptions, past: Past) -> LiveRun:
        """Prepare a run that goes on from `past` and may share its passes with others (`batching`).

        The caller keeps what it leaves behind (`LiveRun.past`). Raises InputError before any work is done.
        """
        limits = self._limits(options, min(options.max_new_tokens, self.room([prompt.ids])))
        decoding, samplers = self._decoding([prompt.ids], [self.params(options)], limits, past)
        common = describe_run(self.files, self.model, limits, options.stop, (*self.notes, "note.served"))
        run = for_row(common, prompt, samplers[0], options.guards)
        recorders = row_recorders([run], self.spell, options.detail, options.save)
        return self._live(decoding, recorders, options, None, None)

    def grow(
        self,
        trace: Trace,
        step: int,
        starts: Sequence[Sequence[int]],
        options: RunOptions,
        progress: Progress | None = None,
    ) -> LiveRun:
        """Prepare forks of a run at one step as one batch: a row for each of `starts`, these tokens laid down.

        All share the past in one memory. Raises InputError before any work is done.
        """
        self.check_same_model(trace.run)
        plan = plan_fork(trace, step, self.params(options), options, self.held)
        prompt = [token.token_id for token in trace.run.prompt_tokens]
        room = self.room([[*prompt, *plan.generated]])
        limits = self._limits(options, step + min(options.max_new_tokens, room))
        past = self._newest.past() if self._newest else NOTHING
        past = replace(past, generated=plan.generated, cache=past.cache.fork() if past.cache else None)
        decoding, samplers = self._decoding([prompt] * len(starts), [plan.params] * len(starts), limits, past)
        for row, start in enumerate(starts):
            samplers[row].draws = plan.draws
            decoding.force(row, start)
        recording = self._taken_recording(len(starts))
        writer = TraceWriter.reopen(plan.folder, plan.settings) if plan.folder else None
        graft = Graft(trace, step, plan.settings)
        recorders = [RowRecorder(plan.run, self.spell, options.detail, writer, graft) for _ in starts]
        self._newest = decoding
        return self._live(decoding, recorders, options, recording, progress)

    @contextmanager
    def observe(
        self,
        sites: Sequence[str] = (),
        *,
        summarise: Sequence[str] = (),
        steps: Container[int] | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> Iterator[Recording]:
        """Look inside the run that is started next: keep `sites` whole and sum `summarise` up (patterns such as
        `layers.*.resid_post`, see `observe.selection.select`), in `steps` or in all. Raises InputError.
        """
        with self.watching(Watch(sites, summarise, steps, budget_bytes=budget_bytes)) as recording:
            yield recording

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[Recording]:
        """`observe`, with everything that can be watched. Raises InputError inside another one."""
        if self._recording is not None:
            raise InputError("observe.nested")
        recording = self._recording = Recording(self.model.config, watch)
        try:
            yield recording
        finally:
            self._recording = None

    def _taken_recording(self, rows: int) -> Recording | None:
        """The recording for a run of `rows` sequences; it looks at one run of one sequence."""
        if self._recording is None:
            return None
        if rows > 1:
            raise InputError("observe.batch", rows=rows)
        if self._recording.taken:
            raise InputError("observe.used")
        self._recording.taken = True
        return self._recording

    def _limits(self, options: RunOptions, most: int) -> Limits:
        stop_ids = frozenset() if options.ignore_eos else self.tokenizer.end_ids
        held = self.loading.cache_format
        return Limits(most, stop_ids, options.use_cache, options.prefill_chunk, options.every_logit, held)

    def _decoding(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], limits: Limits, past: Past
    ) -> tuple[Decoding, list[Sampler]]:
        """Rows with one seed draw from one stream."""
        streams: dict[int | None, DrawStream | None] = {
            each.seed: None if each.seed is None else DrawStream(each.seed) for each in params
        }
        samplers = [Sampler(each, streams[each.seed]) for each in params]
        return Decoding(self.model, prompts, samplers, limits, past), samplers

    def _live(
        self,
        decoding: Decoding,
        recorders: Sequence[RowRecorder],
        options: RunOptions,
        recording: Recording | None,
        progress: Progress | None,
    ) -> LiveRun:
        decoding.on_prefill = progress
        rules = [parse_guard(guard) for guard in options.guards]
        guards = [Guards(rules) for _ in recorders if rules]
        return LiveRun(decoding, recorders, guards, recording)

    def _finished(self, live: LiveRun) -> Trace:
        for _ in live.steps():
            pass
        trace = live.traces[0]
        trace.forker = self.fork
        return trace
