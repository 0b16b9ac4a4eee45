"""What this process and an engine's process tell each other: plain records that fit into a line of JSON."""

from dataclasses import dataclass
from typing import Any

from decodescope.experiments.cache_records import Timing

OURS, TRANSFORMERS, LLAMACPP, OPENVINO = "decodescope", "transformers", "llamacpp", "openvino"
STORED = "stored"  # as the file has it


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with the weights in a format: `stored`, a dtype, or how they are quantised while loading.

    `portable`: without our compiled kernels, as on a machine that has no compiler.
    """

    engine: str = OURS
    format: str = STORED
    portable: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """How a contender is opened: the model at `path`, a folder or GGUF file; or with random weights for the shapes
    in `random`, a config.json.

    `loading` holds, by their names, what our own engine is to be told (see `decodescope.loading`).
    """

    engine: str
    format: str
    path: str
    random: str | None
    device: str
    threads: int
    most_tokens: int  # room in the context, for engines that want to know it at once
    loading: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that is ready. None: it does not tell, and nothing is guessed.

    `weights_bytes` are held, `step_bytes` of them are read whole for every token (all but an embedding that is no
    head); `activations` is their dtype, `kernels` what products run on.
    """

    version: str
    build: str = ""
    activations: str | None = None
    kernels: str | None = None
    weights_bytes: int | None = None
    step_bytes: int | None = None
    open_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Memory of an engine's process: now, and the most it ever held."""

    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Greedily decode `new_tokens` behind the first, which is not timed, for every prompt (all of one length).

    `filled`: the cache holds that many positions of random keys and values before the prompt, which is one token.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    filled: int = 0
    recording: bool = False

    @property
    def context(self) -> int:
        """Positions before the first new token."""
        return self.filled + len(self.prompts[0])


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Read a prompt, to the logits behind its last position."""

    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheTask:
    """Decode with and without the cache behind a prompt repeated or cut to these lengths."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Timed:
    """`tokens` came in `seconds`; the first row's new `ids`, and bytes of one position of one row in the cache."""

    seconds: float
    tokens: int
    ids: tuple[int, ...] = ()
    position_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CacheTimes:
    """The same tokens with and without the cache, at every length."""

    cached: tuple[Timing, ...]
    uncached: tuple[Timing, ...]


def tuples(value: Any) -> Any:
    """What JSON made lists of, as the tuples that they were."""
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return {name: tuples(item) for name, item in value.items()} if isinstance(value, dict) else value
