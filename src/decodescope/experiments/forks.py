"""Going back to a step of a run and on from there with other tokens: all branches as one batch over one past."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decodescope.analysis.tree import parts_at
from decodescope.errors import InputError
from decodescope.experiments.fork_check import verified
from decodescope.experiments.fork_records import BranchToken, ForkedBranch, ForkReport, Verification
from decodescope.forking import forked_options
from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress
from decodescope.options import RunOptions, changed
from decodescope.session import Session
from decodescope.trace.records import Step, Trace


@dataclass(frozen=True, slots=True)
class Forking:
    """Where to fork and how: a branch for each of `tokens` (a text or an id), or for each of the `branches` most
    probable ones that the run recorded there; for neither one branch, whose first token the sampler chooses.

    `changes` are options and sampling values by name that differ from the run's. Raises InputError.
    """

    step: int
    tokens: tuple[str | int, ...] = ()
    branches: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    verify: bool = False

    def __post_init__(self) -> None:
        if self.tokens and self.branches is not None:
            raise InputError("fork.tokens_or_branches")


class ForkStudy:
    """Forks of a run: `run` them, and whatever stops that, `report` tells how far they came."""

    def __init__(self, session: Session, trace: Trace, plan: Forking) -> None:
        """Raises InputError for a step, tokens or settings that cannot be, and for the run of another model."""
        self._session, self._trace, self._plan = session, trace, plan
        session.check_same_model(trace.run)
        self._options = checked_options(trace, plan)
        self._starts = first_tokens(session, trace, plan)
        self._live: LiveRun | None = None
        self._shared_bytes = self._added_bytes = 0
        self._seconds = 0.0
        self._verified: dict[int, Verification] = {}

    @property
    def started(self) -> bool:
        """Whether there is something to report."""
        return self._live is not None

    def run(self, progress: Progress | None = None) -> None:
        """Decode every branch to its end, then verify them where that is wanted.

        `progress` is told (positions read, in all). Raises what `Session.grow` raises before any work, and what
        `LiveRun.steps` does.
        """
        live = self._session.grow(self._trace, self._plan.step, self._starts, self._options, progress)
        self._live, started = live, time.perf_counter()
        try:
            for _ in live.steps():
                self._measure(live)
        finally:
            live.finish("interrupted")  # says nothing where the branches have ended
            self._seconds = time.perf_counter() - started
        if self._plan.verify:
            for row, trace in enumerate(live.traces):
                self._verified[row] = verified(self._session.model, trace, self._plan.step)

    def report(self) -> ForkReport:
        """What came of it so far. Needs forks that were begun."""
        assert self._live is not None
        traces, run = self._live.traces, self._live.traces[0].run
        return ForkReport(
            model=run.model,
            dtype=run.dtype,
            device=run.device,
            trace=next((trace.end.trace for trace in traces if trace.end), None),
            step=self._plan.step,
            past_tokens=self._past,
            reused_tokens=self._live.reused_tokens,
            settings=traces[0].branches[_number(traces[0]) - 1].settings,
            branches=tuple(self._branch(row, trace) for row, trace in enumerate(traces)),
            shared_bytes=self._shared_bytes,
            added_bytes=self._added_bytes,
            seconds=self._seconds,
        )

    @property
    def _past(self) -> int:
        return len(self._trace.run.prompt_tokens) + self._plan.step

    def _measure(self, live: LiveRun) -> None:
        """The cache at its largest; a branch that read the past itself holds it in its own memory."""
        cache = live.cache
        past = cache.shared_bytes or cache.position_bytes * min(cache.length, self._past)
        self._shared_bytes = max(self._shared_bytes, past)
        self._added_bytes = max(self._added_bytes, cache.allocated_bytes - past)

    def _branch(self, row: int, trace: Trace) -> ForkedBranch:
        path, end, step = trace.path(), trace.end, self._plan.step
        assert end is not None  # `LiveRun` has ended every row
        own = path[step:]
        return ForkedBranch(
            number=_number(trace),
            step=step,
            tokens=tuple(map(_token, own)),
            text=end.text,
            own_text=end.text.removeprefix("".join(each.delta_text for each in path[:step])),
            logprob_nats=sum(each.logprob_nats for each in path),
            own_logprob_nats=sum(each.logprob_nats for each in own),
            parts_at=parts_at(path, self._trace.path()),
            finish_reason=end.finish_reason,
            error=end.error,
            ttft_s=end.ttft_s,
            decode_tokens_per_s=end.decode_tokens_per_s,
            verification=self._verified.get(row),
        )


def _number(trace: Trace) -> int:
    """The place of a fork among those of its run, from 1."""
    return next(number for number, fork in enumerate(trace.branches, start=1) if fork.end is trace.end)


def checked_options(trace: Trace, plan: Forking) -> RunOptions:
    """The options of forks of a run. Raises InputError for whatever can be refused without the model."""
    options = changed(forked_options(trace, plan.step), plan.changes)
    if plan.branches is not None:
        most_probable(trace, plan.step, plan.branches)
    return options


def first_tokens(session: Session, trace: Trace, plan: Forking) -> list[tuple[int, ...]]:
    """The tokens laid down first, a list for each branch. Raises InputError."""
    if plan.branches is not None:
        return [(token_id,) for token_id in most_probable(trace, plan.step, plan.branches)]
    # The same token twice is one branch.
    ids = dict.fromkeys(session.token_id(token) for token in plan.tokens)
    return [(token_id,) for token_id in ids] or [()]


def most_probable(trace: Trace, step: int, count: int) -> list[int]:
    """The ids of the most probable tokens that a run recorded at a step.

    Raises InputError where it recorded fewer, also right behind its last token.
    """
    path = trace.path()
    if step == len(path):
        raise InputError("fork.nothing_recorded", step=step)
    candidates = path[step].candidates
    ranked = [each.token_id for place, each in enumerate(candidates, start=1) if each.rank == place]
    if not 1 <= count <= len(ranked):
        raise InputError("fork.branches", value=count, most=len(ranked), step=step)
    return ranked[:count]


def _token(step: Step) -> BranchToken:
    return BranchToken(step.step, step.token_id, step.text, step.prob, step.logprob_nats, step.forced)
