"""The cases of one axis take turns: A B C, B C A, C A B, the machine's limit measured before each of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from decodescope.errors import DecodescopeError
from decodescope.experiments.bench.machine import Limits
from decodescope.experiments.bench.messages import Contender, DecodeTask
from decodescope.experiments.bench.plan import SHORT, Case, Plan
from decodescope.experiments.bench.process import EngineFault, Pool, Process
from decodescope.experiments.bench.series import Series

_LEAST_ROUNDS = 2
_TRIAL_TOKENS = 3


class Rounds:
    """`series` holds what each case gave; `failed` why a contender did not, which ends nobody else's part but for
    the first one's, with whom all are compared."""

    def __init__(self, cases: Sequence[Case], plan: Plan, pool: Pool, limits: Limits) -> None:
        self.series = [Series(case) for case in cases]
        self.failed: dict[Contender, Exception] = {}
        self._plan, self._pool, self._limits = plan, pool, limits

    def run(self) -> Iterator[None]:
        """Yields after every measurement, `plan.rounds` times the number of cases, or less when time is up. Raises
        what went wrong with the first contender."""
        started = time.perf_counter()
        for turn in range(self._plan.rounds):
            start = turn % max(len(self.series), 1)
            for series in self.series[start:] + self.series[:start]:
                self._measure(series, turn)
                yield
            if turn + 1 >= _LEAST_ROUNDS and time.perf_counter() - started > self._plan.axis_s:
                return

    def _measure(self, series: Series, turn: int) -> None:
        contender = series.case.contender
        if contender in self.failed:
            return
        try:
            process = self._pool.get(contender)
            self._try_out(process, series)
            task = series.case.turned(turn, series.new_tokens)
            if isinstance(task, DecodeTask):
                limit, timed = self._limits.read(), process.decode(task)
            else:
                limit, timed = self._limits.best_gemm(), process.prefill(task)
            series.add(timed, limit)
        except (EngineFault, DecodescopeError) as fault:
            self._pool.drop(contender)
            if contender == self.series[0].case.contender:
                raise
            self.failed[contender] = fault

    def _try_out(self, process: Process, series: Series) -> None:
        """The first time in a process is not counted; it tells how many tokens to decode."""
        case = series.case
        if case in process.tried_out:
            return
        process.tried_out.add(case)
        if not isinstance(case.task, DecodeTask):
            process.prefill(replace(case.task, prompt=case.task.prompt[:SHORT]))
            return
        trial = process.decode(replace(case.task, new_tokens=min(_TRIAL_TOKENS, self._plan.new_tokens)))
        if not series.new_tokens:
            series.choose_length(trial, len(case.task.prompts), self._plan.measure_s, self._plan.new_tokens)
