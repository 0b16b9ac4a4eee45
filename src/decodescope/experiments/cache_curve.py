"""What the cache buys: the same tokens with and without it, at several prompt lengths; positions and seconds.

Without a cache every step sends the whole sequence through the model again: for a prompt of P tokens and N new
ones P + (P + 1) + ... + (P + N - 1) positions; with one, P once and then one a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median

from decodescope.errors import InputError
from decodescope.experiments.cache_records import CacheReport, Comparison, Timing
from decodescope.experiments.cache_table import memory_of, watch_cache
from decodescope.experiments.passes import counted
from decodescope.model.checkpoint import Progress
from decodescope.model.config import ModelConfig
from decodescope.model.cost import CACHE_FORMATS, kv_bytes_per_token
from decodescope.model.placement import devices_of
from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.text.chat import Prompt


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How many new tokens, behind prompts of which `lengths` (none: no experiment), how often each.

    Raises InputError for numbers that cannot be.
    """

    new_tokens: int = 8
    lengths: tuple[int, ...] = ()
    repeats: int = 1

    def __post_init__(self) -> None:
        RunOptions(max_new_tokens=self.new_tokens)
        if any(length < 1 for length in self.lengths):
            raise InputError("kv.lengths", value=",".join(map(str, self.lengths)))
        if self.repeats < 1:
            raise InputError("kv.repeats", value=self.repeats)


def study_cache(
    session: Session, prompt: Prompt, plan: CachePlan, progress: Progress | None = None
) -> Iterator[CacheReport]:
    """Watch the cache of one run, then make the plan's experiment: the report as far as it has come, after every
    step and after every length. Whatever ends it, what was yielded last is what was measured.

    Raises InputError for a prompt or a length that does not fit, before any work; later ResourceError and
    FindingError.
    """
    check_fits(session, plan)
    live = session.start([prompt], RunOptions(max_new_tokens=plan.new_tokens, candidates=1))
    report = None
    for report in watch_cache(session, live):
        yield report
    if report is not None:
        for cached, uncached in compare_lengths(session, prompt, plan, progress):
            report = replace(
                report,
                cached=(*report.cached, cached),
                uncached=(*report.uncached, uncached),
                compared=(*report.compared, compare(cached, uncached)),
            )
            yield report
        yield replace(report, complete=True)


def compare_lengths(
    session: Session, prompt: Prompt, plan: CachePlan, progress: Progress | None = None
) -> Iterator[tuple[Timing, Timing]]:
    """Decode the plan's tokens with and without the cache, one after the other so that a busy machine slows both,
    at every length; end tokens end nothing. The prompt is repeated or cut to the length."""
    ways = (True, False)
    share = [token_forwards(length, plan.new_tokens, way) for length in plan.lengths for way in ways]
    done, total = 0, sum(share) * plan.repeats

    def told(token_forwards: int) -> None:
        if progress:
            progress(done + token_forwards, total)

    for length in plan.lengths:
        sized = prompt_of_length(prompt, length)
        runs: dict[bool, list[Timing]] = {True: [], False: []}
        for way in ways * plan.repeats:
            timing = _decode(session, sized, plan.new_tokens, way, told)
            runs[way].append(timing)
            done += timing.token_forwards
        yield _median(runs[True]), _median(runs[False])


def token_forwards(length: int, new_tokens: int, use_cache: bool) -> int:
    """Positions that `new_tokens` behind a prompt of `length` send through the model: the closed formula."""
    again = new_tokens - 1  # the last new token is not fed
    if use_cache:
        return length + again
    return new_tokens * length + new_tokens * again // 2


def prompt_of_length(prompt: Prompt, length: int) -> Prompt:
    """The prompt's tokens, repeated from the start or cut, until they are `length` many."""
    tokens = tuple(islice(cycle(prompt.tokens), length))
    return Prompt("".join(token.text for token in tokens), tokens)


def compare(cached: Timing, uncached: Timing) -> Comparison:
    """The two ways side by side."""
    pairs = zip(cached.token_ids, uncached.token_ids, strict=True)
    parts_at = next((step for step, (one, other) in enumerate(pairs) if one != other), None)
    return Comparison(
        length=cached.length,
        token_forwards_ratio=uncached.token_forwards / cached.token_forwards,
        seconds_ratio=uncached.seconds / cached.seconds,
        same_tokens=parts_at is None,
        parts_at=parts_at,
    )


def check_fits(session: Session, plan: CachePlan) -> None:
    """Raises InputError for a length that the context, or what memory is available, cannot hold."""
    config, model = session.model.config, session.model
    _, available = memory_of(devices_of(model))
    for length in plan.lengths:
        positions = length + plan.new_tokens
        if positions > config.max_position_embeddings:
            context = config.max_position_embeddings
            raise InputError("kv.beyond_context", length=length, new=plan.new_tokens, context=context)
        cached = kv_bytes_per_token(config, *CACHE_FORMATS[session.cache_dtype or session.dtype])
        needed = positions * max(cached, _pass_bytes(config, model.dtype.itemsize))  # of the two ways
        if needed > available:
            raise InputError("kv.too_big", length=length, needed=needed, available=available)


def _pass_bytes(config: ModelConfig, value_bytes: int) -> int:
    """What a pass over all positions needs at least for each: the MLP's three wide values and the stream."""
    return (3 * config.intermediate_size + 2 * config.hidden_size) * value_bytes


def _decode(
    session: Session, prompt: Prompt, new_tokens: int, use_cache: bool, told: Callable[[int], None]
) -> Timing:
    options = RunOptions(max_new_tokens=new_tokens, ignore_eos=True, use_cache=use_cache, candidates=1)
    live = session.start([prompt], options)
    seconds = 0.0
    with counted(session.model) as passes:
        for _, step in live.steps():
            seconds += step.timing.forward_s + step.timing.sample_s
            told(passes.token_forwards)
    length = len(prompt.tokens)
    return Timing(
        length=length,
        new_tokens=new_tokens,
        token_forwards=passes.token_forwards,
        token_forwards_formula=token_forwards(length, new_tokens, use_cache),
        seconds=seconds,
        repeats_seconds=(seconds,),
        token_ids=tuple(live.traces[0].token_ids),
    )


def _median(runs: Sequence[Timing]) -> Timing:
    """One timing for all repeats, which differ in nothing but time."""
    seconds = tuple(run.seconds for run in runs)
    return replace(runs[0], seconds=median(seconds), repeats_seconds=seconds)
