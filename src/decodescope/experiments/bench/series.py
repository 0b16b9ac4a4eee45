"""What the rounds of a case gave, and the row that comes of it."""

from dataclasses import dataclass, field
from statistics import median

from decodescope.experiments.bench.figures import prefill_flops
from decodescope.experiments.bench.messages import DecodeTask, Opened, PrefillTask, Timed
from decodescope.experiments.bench.plan import Case
from decodescope.experiments.bench.records import DecodeRow, PrefillRow
from decodescope.model.config import ModelConfig
from decodescope.sequences import common_length

_LEAST_TOKENS = 8


@dataclass(slots=True)
class Series:
    """One case, round by round: what was timed, and the machine's limit just before, in bytes or operations a
    second."""

    case: Case
    new_tokens: int = 0
    timed: list[Timed] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, timed: Timed, limit: float) -> None:
        """Take down one round."""
        self.timed.append(timed)
        self.limits.append(limit)

    def choose_length(self, trial: Timed, rows: int, measure_s: float, most: int) -> None:
        """From a short trial, how many tokens come to `measure_s` seconds."""
        wanted = int(measure_s * trial.tokens / rows / max(trial.seconds, 1e-9))
        self.new_tokens = min(max(wanted, _LEAST_TOKENS), most)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of every round."""
        return [timed.tokens / timed.seconds for timed in self.timed]

    def ratio(self, first: "Series") -> float:
        """This one / the first, as far as both have come."""
        return median(own / other for own, other in zip(self.rates, first.rates, strict=False))


def decode_row(series: Series, first: Series, opened: Opened) -> DecodeRow:
    """A decoding case as far as it has come, beside the first of its axis."""
    task, case = series.case.task, series.case
    assert isinstance(task, DecodeTask)
    rows, newest = len(task.prompts), series.timed[-1]
    cached = task.context + 1 + series.new_tokens / 2  # positions of a row, on the average of the steps
    per_row = None if newest.position_bytes is None else int(cached * newest.position_bytes)
    read = None if per_row is None or opened.step_bytes is None else opened.step_bytes + rows * per_row
    limits = [rows * limit / read for limit in series.limits] if read else None
    return DecodeRow(
        axis=case.axis,
        engine=case.contender.engine,
        format=case.contender.format,
        kernels=opened.kernels,
        context=task.context,
        filled=task.filled > 0,
        batch=rows,
        recording=task.recording,
        new_tokens=series.new_tokens,
        tokens_per_s=median(series.rates),
        tokens_per_s_min=min(series.rates),
        tokens_per_s_max=max(series.rates),
        rounds=len(series.timed),
        step_bytes=read,
        cache_bytes=None if per_row is None else rows * per_row,
        limit_tokens_per_s=median(limits) if limits else None,
        limit_share=_share(series, limits) if limits else None,
        ratio=series.ratio(first),
        same_tokens=_same(series, first),
    )


def prefill_row(series: Series, first: Series, opened: Opened, config: ModelConfig) -> PrefillRow:
    """A prefill case as far as it has come, beside the first of its axis."""
    case = series.case
    assert isinstance(case.task, PrefillTask)
    tokens = len(case.task.prompt)
    flops = prefill_flops(config, tokens)
    limits = [tokens * limit / flops for limit in series.limits]
    return PrefillRow(
        axis=case.axis,
        engine=case.contender.engine,
        format=case.contender.format,
        kernels=opened.kernels,
        tokens=tokens,
        tokens_per_s=median(series.rates),
        tokens_per_s_min=min(series.rates),
        tokens_per_s_max=max(series.rates),
        rounds=len(series.timed),
        flops=flops,
        limit_tokens_per_s=median(limits),
        limit_share=_share(series, limits),
        ratio=series.ratio(first),
    )


def _share(series: Series, limits: list[float]) -> float:
    """What was reached of the limits, tokens a second in each round."""
    return median(rate / limit for rate, limit in zip(series.rates, limits, strict=True))


def _same(series: Series, first: Series) -> int | None:
    """How many new tokens agree, where both went on from the same."""
    one, other = series.case.task, first.case.task
    assert isinstance(one, DecodeTask) and isinstance(other, DecodeTask)
    alike = (one.prompts[0], one.filled) == (other.prompts[0], other.filled)
    own, theirs = (each.timed[-1].ids[: series.new_tokens] for each in (series, first))
    return common_length(own, theirs) if alike and own else None
