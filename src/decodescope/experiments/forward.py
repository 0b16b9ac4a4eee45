"""One prompt's way through the model, every inner value summed up, beside an earlier run where there is one."""

import math
from dataclasses import dataclass
from pathlib import Path

from decodescope.analysis.departure import Comparison, Seen, compare_runs
from decodescope.analysis.residual import StreamChange
from decodescope.errors import InputError
from decodescope.experiments.forward_records import Edges, ForwardReport, Pass
from decodescope.experiments.rope import RopePlan, check_plan, study_rope
from decodescope.experiments.rope_records import RopeReport
from decodescope.experiments.side_taps import EdgeTap, StreamTap
from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress
from decodescope.model.config import ModelConfig
from decodescope.observe.recording import DEFAULT_BUDGET, Recording, Watch
from decodescope.observe.selection import Place, places, select, select_layers
from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.text.chat import Prompt
from decodescope.trace.records import Trace
from decodescope.trace.saved import read_sites, read_trace, saved_tensors
from decodescope.trace.site_records import address


@dataclass(frozen=True, slots=True)
class Reference:
    """An earlier run that was looked into and saved."""

    folder: Path
    seen: Seen


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """What to look at: patterns of sites and numbers of layers (none: all), in the pass over the prompt or in
    `steps` generated tokens. Raises InputError for what cannot be.
    """

    steps: int = 0
    sites: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    values: bool = False  # the corners of every tensor, too
    keep: tuple[str, ...] = ()  # patterns of tensors to store in the run folder
    budget_bytes: int = DEFAULT_BUDGET
    save: Path | None = None
    against: Reference | None = None
    tolerance: float | None = None  # relative; None: that of the dtype
    rope: RopePlan | None = None  # the rotary positions, too

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InputError("steps", value=self.steps)
        if self.keep and self.save is None:
            raise InputError("run.keep_needs_save")
        if self.tolerance is not None and self.against is None:
            raise InputError("forward.tolerance_needs_against")
        if self.tolerance is not None and not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise InputError("forward.tolerance", value=self.tolerance)


def read_reference(folder: Path) -> Reference:
    """A saved run to compare with. Raises InputError where the folder holds none, or one without sites."""
    trace, sites = read_trace(folder), read_sites(folder)
    if not sites:
        raise InputError("forward.no_sites", path=folder)
    return Reference(folder, Seen(trace.run, tuple(trace.token_ids), sites))


def chosen_places(config: ModelConfig, sites: tuple[str, ...], layers: tuple[str, ...]) -> tuple[Place, ...]:
    """The places that the patterns name, in the layers named, in the order of computation; what has no layer is
    left out with `layers`, unless a pattern asks for it. Raises InputError where nothing is named."""
    named, wanted = select(config, sites or ("*",)), select_layers(config, layers)
    outside = bool(sites) or not layers
    chosen = tuple(p for p in places(config) if p in named and (outside if p[1] is None else p[1] in wanted))
    if not chosen:
        raise InputError("forward.nothing_chosen", sites=", ".join(sites), layers=", ".join(layers))
    return chosen


class ForwardStudy:
    """A run that is looked into: `run` it, and whatever stops it, `report` tells how far it came."""

    def __init__(self, session: Session, prompt: Prompt, plan: ForwardPlan) -> None:
        """Raises InputError for sites, layers and tensors that the model does not have."""
        self._session, self._prompt, self._plan = session, prompt, plan
        self._places = chosen_places(session.model.config, plan.sites, plan.layers)
        select(session.model.config, plan.keep)
        if plan.against and not {(each.site, each.layer) for each in plan.against.seen.sites} & set(self._places):
            raise InputError("forward.nothing_common", path=plan.against.folder)
        if plan.rope is not None:
            check_plan(session.model.config, plan.rope)
        self._stream, self._edges = StreamTap(), EdgeTap(self._places if plan.values else ())
        self._live: LiveRun | None = None
        self._recording: Recording | None = None
        self._passes = 0  # that came to their end
        self._growth: list[StreamChange] = []
        self._values: list[Edges] = []
        self._rope: RopeReport | None = None

    @property
    def started(self) -> bool:
        """Whether there is something to report."""
        return self._live is not None

    def run(self, progress: Progress | None = None) -> None:
        """Make all passes; `progress` is told (positions read, in all). Raises what `Session.start` raises before
        any work, and what `LiveRun.steps` does."""
        options = RunOptions(
            max_new_tokens=max(self._plan.steps, 1), candidates=1, save=self._plan.save, every_logit=True
        )
        with self._session.watching(self._watch()) as recording:
            self._recording = recording
            self._live = self._session.start([self._prompt], options, progress)
            try:
                for _ in self._live.steps():
                    self._end_pass()
            finally:
                if recording.summaries_of(self._passes):  # after this pass nothing could be chosen
                    self._end_pass()
        if self._plan.rope is not None:
            self._rope = study_rope(self._session, self._prompt, self._plan.rope)

    def report(self) -> ForwardReport:
        """What was seen, as far as the run has come. Needs a run that has started."""
        assert self._live is not None and self._recording is not None
        recording, (trace,) = self._recording, self._live.traces
        run, end, plan = trace.run, trace.end, self._plan
        against = self._comparison(trace)
        return ForwardReport(
            model=run.model,
            source=run.source,
            revision=run.revision,
            sha256=run.sha256,
            architecture=run.architecture,
            dtype=run.dtype,
            device=run.device,
            attention=run.attention,
            notes=run.notes,
            ids=tuple(token.token_id for token in run.prompt_tokens),
            tokens=run.prompt_tokens,
            steps=self._steps(trace),
            sites=tuple(recording.summaries),
            values=tuple(self._values),
            first_nonfinite=recording.first_nonfinite,
            layers=tuple(recording.layer_costs),
            growth=tuple(self._growth),
            reconstruction_error=recording.reconstruction_error,
            kept=tuple(saved_tensors(plan.save)) if plan.save and plan.keep else (),
            kept_bytes=recording.kept.bytes,
            budget_bytes=plan.budget_bytes,
            dropped=tuple(recording.dropped),
            against=against,
            departure=against.departure if against else None,
            rope=self._rope,
            finish_reason=end.finish_reason if end else None,
            trace=end.trace if end else None,
        )

    def _watch(self) -> Watch:
        all_of_them = not self._plan.sites and not self._plan.layers
        chosen = ("*",) if all_of_them else tuple(address(*place) for place in self._places)
        beside = (self._stream, self._edges)
        return Watch(self._plan.keep, chosen, budget_bytes=self._plan.budget_bytes, clock=True, beside=beside)

    def _end_pass(self) -> None:
        """Take over what was seen on the way to the choice of one token."""
        step = self._passes
        self._growth += self._stream.taken(step)
        self._values += self._edges.taken(step, self._positions(step))
        self._passes += 1

    def _positions(self, step: int) -> range:
        """Those that are fed on the way to a step's choice."""
        prompt = len(self._prompt.ids)
        return range(prompt) if step == 0 else range(prompt + step - 1, prompt + step)

    def _steps(self, trace: Trace) -> tuple[Pass, ...]:
        chosen = {step.step: step for step in trace.path()}
        passes = []
        for number in range(self._passes):
            fed, step = self._positions(number), chosen.get(number)
            token = (None, None, None) if step is None else (step.token_id, step.text, step.prob)
            passes.append(Pass(number, fed[0], fed[-1], *token))
        return tuple(passes)

    def _comparison(self, trace: Trace) -> Comparison | None:
        reference = self._plan.against
        if reference is None or self._recording is None:
            return None
        here = Seen(trace.run, tuple(trace.token_ids), self._recording.summaries)
        return compare_runs(here, reference.seen, str(reference.folder), self._plan.tolerance)
