"""What `bench` leaves behind: frozen records, units in the field names, no torch.

Every rate is the median of rounds, with the least and the most of them beside it. What was compared took turns,
round by round, and so did the machine's limit: shares and ratios are medians of what each round gave.
"""

from dataclasses import dataclass

from decodescope.experiments.cache_records import Comparison, Timing


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Memory read by this many threads."""

    threads: int
    bytes_per_s: float
    bytes_per_s_min: float
    bytes_per_s_max: float
    rounds: int


@dataclass(frozen=True, slots=True)
class GemmRate:
    """A large matrix product in a dtype, by this many threads."""

    dtype: str
    threads: int
    flops: float  # operations a second
    flops_min: float
    flops_max: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine is and gives. `kernels` None: not compiled, for the reason `kernels_missing`.

    `read_bytes_per_s` and `gemm_flops` are those of all threads, the latter in its fastest dtype. The gains are
    all threads / one thread; `threads_in_vain`: so small that another process must want the same cores.
    """

    processor: str
    cores: int
    threads: int
    device: str
    memory_total_bytes: int
    load_average: float | None
    torch: str
    python: str
    kernels: str | None
    kernels_missing: str | None
    read: tuple[ReadRate, ...]
    gemm: tuple[GemmRate, ...]
    read_bytes_per_s: float
    gemm_flops: float
    gemm_dtype: str
    read_gain: float | None
    gemm_gain: float | None
    threads_in_vain: bool


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Decoding behind `context` positions; rows of one `axis` took turns, and `ratio` is this one / the first.

    `filled`: the cache held random keys and values. `step_bytes` are the weights and cached positions that one
    step reads; `limit_share` is what of the machine's reading speed that comes to. Both None where the engine does
    not tell. `new_tokens` were timed in each round; `same_tokens`: how many are the first row's, from the start.
    """

    axis: str
    engine: str
    format: str
    kernels: str | None
    context: int
    filled: bool
    batch: int
    recording: bool
    new_tokens: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    rounds: int
    step_bytes: int | None
    cache_bytes: int | None
    limit_tokens_per_s: float | None
    limit_share: float | None
    ratio: float
    same_tokens: int | None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Reading a prompt of `tokens`, as in `DecodeRow`; `flops` are those of the whole prompt."""

    axis: str
    engine: str
    format: str
    kernels: str | None
    tokens: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    rounds: int
    flops: int
    limit_tokens_per_s: float
    limit_share: float
    ratio: float


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine that was opened, and its process's memory: resident when it was ready, the most until then, the
    most until the end."""

    engine: str
    format: str
    version: str
    build: str
    activations: str | None
    kernels: str | None
    weights_bytes: int | None
    ready_rss_bytes: int
    loading_peak_rss_bytes: int
    peak_rss_bytes: int | None


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Opening the model in a fresh process, its `file` cold (not in the page cache) or warm; imports left out."""

    file: str
    seconds: float
    seconds_min: float
    seconds_max: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Missing:
    """An engine, or part of the work, that was left out; `reason` is a sentence's key, `detail` fills it."""

    what: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that was measured, as far as it has come (`complete`).

    `engines_took_turns`: memory could not hold them side by side; each was opened anew for every round.
    """

    model: str
    architecture: str
    parameters: int
    stored_bytes: dict[str, int]
    machine: Machine
    engines: tuple[EngineRow, ...]
    engines_took_turns: bool
    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillRow, ...]
    cached: tuple[Timing, ...]
    uncached: tuple[Timing, ...]
    compared: tuple[Comparison, ...]
    load: tuple[LoadRow, ...]
    missing: tuple[Missing, ...]
    seconds: float
    complete: bool
