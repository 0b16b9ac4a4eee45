"""What a run leaves behind: frozen records, units in the field names, no torch.

The field names are the keys of `run --json` and of the database; `docs/trace-format.md` explains them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, Literal

FinishReason = Literal["stop", "length", "interrupted", "error"]


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt: where it came from and what it stands for."""

    position: int
    token_id: int
    text: str
    bytes_hex: str
    role: str  # text, system, user, assistant, template
    injected: bool = False  # a control id that was typed inside content
    partial: bool = False  # holds only part of a character's bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """One sampling setting in force, and who set it: `command line`, `checkpoint` or `default`."""

    name: str
    value: float | int | bool | str | None
    origin: str


@dataclass(frozen=True, slots=True)
class Run:
    """What was known before the first step."""

    model: str
    source: str  # where the files came from: folder, file, hub, modelscope, ollama, wheels, cache ...
    path: str
    revision: str | None
    sha256: str | None
    architecture: str
    dtype: str
    device: str
    attention: str  # the kernel that ran: sdpa or explicit
    use_cache: bool
    prompt_text: str  # after the chat template
    prompt_tokens: tuple[PromptToken, ...]
    settings: tuple[Setting, ...]
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    max_new_tokens: int
    kv_bytes_per_token: int  # by the formula
    vocabulary: int  # rows of the logits
    versions: dict[str, str]
    started_at: str  # ISO 8601, UTC
    notes: tuple[str, ...] = ()  # things the reader should know: catalogue keys, some as `key:detail`


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have been chosen; `rank` counts from 1 by raw logit."""

    rank: int
    token_id: int
    text: str
    bytes_hex: str
    logit: float
    prob_raw: float
    prob_final: float  # after all stages; 0 when a stage removed it
    removed_by: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One sampler stage: what it left. `kept_mass` is of the distribution that entered the stage."""

    name: str
    settings: dict[str, Any]
    survivors: int
    kept_mass: float
    entropy_nats: float


@dataclass(frozen=True, slots=True)
class Kv:
    """The KV cache after the forward pass of a step."""

    tokens: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured wall time of a step; the first step's forward is the prefill."""

    forward_s: float
    sample_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Measured memory at the end of a step; `device_bytes` is None on a CPU."""

    rss_bytes: int
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop: one token chosen.

    `prob`, `logprob_nats`, `rank`, `entropy_nats`, `margin_logits` are those of the raw distribution;
    `prob_final` is the chosen token's probability after all stages. `margin_logits` is the distance
    between the two highest raw logits. `position` is the token's own index in the sequence.
    """

    step: int
    position: int
    token_id: int
    bytes_hex: str
    text: str
    delta_text: str
    node: int
    parent: int | None
    rank: int
    logprob_nats: float
    prob: float
    prob_final: float
    entropy_nats: float
    margin_logits: float
    candidates: tuple[Candidate, ...]
    stages: tuple[Stage, ...]
    kv: Kv
    timing: Timing
    memory: Memory
    forced: bool = False  # chosen by hand, not by the sampler


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended: what is said of the branch that was kept, up to `node` (None: no token was kept).

    `ttft_s` is prefill plus the first choice; decode speed leaves the first step out.
    """

    finish_reason: FinishReason
    stop_token_id: int | None
    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    peak_rss_bytes: int | None
    trace: str | None = None
    error: str | None = None
    stop_string: str | None = None
    node: int | None = None


@dataclass(slots=True, repr=False)
class Trace:
    """A whole run: its header, the steps of every branch in the order they were made, and its end."""

    run: Run
    steps: list[Step] = field(default_factory=list)
    end: End | None = None

    def path(self) -> list[Step]:
        """The branch that was kept: the steps from the root to the node of the end.

        Without an end (or with one that has tokens but names no node) it is the branch of the last step.
        """
        if self.end and (self.end.node is not None or not self.end.new_tokens):
            return path_to(self.steps, self.end.node)
        return path_to(self.steps, self.steps[-1].node) if self.steps else []

    @property
    def token_ids(self) -> list[int]:
        """The ids of `path`."""
        return [step.token_id for step in self.path()]

    @property
    def text(self) -> str:
        """The text as it was printed: that of the end, or so far what the steps of `path` added."""
        return self.end.text if self.end else _joined(self.path())

    def __repr__(self) -> str:
        """One line, however long the run."""
        end, text = self.end.finish_reason if self.end else None, short(self.text)
        return f"Trace(model={self.run.model!r}, steps={len(self.steps)}, finish_reason={end!r}, text={text})"

    def _repr_html_(self) -> str:
        from decodescope.trace.html import trace_html

        return trace_html(self)


def path_to(steps: list[Step], node: int | None) -> list[Step]:
    """The steps from the root to `node`, in order; none for None."""
    by_node = {step.node: step for step in steps}
    path: list[Step] = []
    while node is not None:
        path.append(by_node[node])
        node = by_node[node].parent
    return path[::-1]


def end_of(
    run: Run,
    path: Sequence[Step],
    reason: FinishReason,
    text: str | None = None,
    stop_string: str | None = None,
    error: str | None = None,
) -> End:
    """The end of the branch `path`, as far as its steps tell; `peak_rss_bytes` and `trace` stay None.

    `text` is what was printed, where that is more than the steps' `delta_text` (held-back text).
    """
    decode_s = sum(step.timing.total_s for step in path[1:])
    return End(
        finish_reason=reason,
        stop_token_id=path[-1].token_id if path and reason == "stop" and stop_string is None else None,
        text=_joined(path) if text is None else text,
        prompt_tokens=len(run.prompt_tokens),
        new_tokens=len(path),
        ttft_s=path[0].timing.forward_s + path[0].timing.sample_s if path else None,
        decode_tokens_per_s=(len(path) - 1) / decode_s if decode_s > 0 else None,
        peak_rss_bytes=None,
        error=error,
        stop_string=stop_string,
        node=path[-1].node if path else None,
    )


def _joined(path: Sequence[Step]) -> str:
    return "".join(step.delta_text for step in path)
