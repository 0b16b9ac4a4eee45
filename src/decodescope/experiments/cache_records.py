"""What a study of the KV cache leaves behind: frozen records, units in the field names, no torch.

Bytes are measured on the tensors held unless the name says `formula`.
"""

from dataclasses import dataclass

from decodescope.trace.records import FinishReason


@dataclass(frozen=True, slots=True)
class CacheStep:
    """The cache after the forward pass of one step; `fed_tokens` of its tokens were new in this pass."""

    step: int
    token_id: int
    text: str
    fed_tokens: int
    cached_tokens: int
    used_bytes: int
    allocated_bytes: int
    formula_bytes: int
    seconds: float  # forward pass and choice


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: each of `shape` [B, K, S, d]; bytes are those of both together.

    `formula_bytes` is 2 * K * (d * bytes of a value + bytes of a scale) * positions counted through the model;
    `agrees`: the bytes used are just that, and keys and values have one shape.
    """

    layer: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    used_bytes: int
    allocated_bytes: int
    formula_bytes: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class GqaSaving:
    """What sharing keys and values among query heads saves: by the formula, both ways."""

    query_heads: int
    kv_heads: int
    ratio: float  # bytes if every query head had its own / bytes as it is
    bytes_per_token: int
    mha_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The cache's cost in a dtype (`--cache-dtype`), by the formula, scales counted."""

    dtype: str
    bytes_per_token: int
    bytes_at: dict[int, int]  # context length -> bytes
    in_use: bool


@dataclass(frozen=True, slots=True)
class Room:
    """How far the cache can still grow on this machine: estimated, activations are not in it.

    `available_bytes` are those free now, the weights loaded; `tokens_left` is bounded by the context, too.
    `dtypes` says it for the model loaded in another dtype instead (see `model.cost.fit`).
    """

    kind: str
    memory_total_bytes: int
    memory_available_bytes: int
    context: int
    tokens_by_memory: int
    tokens_left: int
    dtypes: dict[str, dict[str, bool | int]]


@dataclass(frozen=True, slots=True)
class Timing:
    """`new_tokens` decoded behind a prompt of `length` tokens, in one of the two ways.

    `token_forwards` are the positions counted on their way through the model; `seconds` (prefill included) is the
    median of `repeats_seconds`.
    """

    length: int
    new_tokens: int
    token_forwards: int
    token_forwards_formula: int
    seconds: float
    repeats_seconds: tuple[float, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Without the cache / with it, at one length. `parts_at`: the first new token that differs, if any."""

    length: int
    token_forwards_ratio: float
    seconds_ratio: float
    same_tokens: bool
    parts_at: int | None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cache of one run, and what it buys: as far as it has come (`complete`)."""

    model: str
    architecture: str
    dtype: str
    device: str
    prompt_tokens: int
    bytes_per_token: int  # measured: one position in the buffers of all layers
    bytes_per_token_formula: int
    used_bytes: int
    allocated_bytes: int
    formula_bytes: int
    agrees: bool  # every layer does
    steps: tuple[CacheStep, ...]
    finish_reason: FinishReason | None  # of the watched run; None while it goes on
    notes: tuple[str, ...]  # things the reader should know: catalogue keys
    layers: tuple[LayerCache, ...]
    gqa: GqaSaving
    cache_dtypes: tuple[CacheDtype, ...]
    fit: Room
    cached: tuple[Timing, ...] = ()
    uncached: tuple[Timing, ...] = ()
    compared: tuple[Comparison, ...] = ()
    complete: bool = False
