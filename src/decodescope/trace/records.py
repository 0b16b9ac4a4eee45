"""What a run leaves behind: frozen records, units in the field names, no torch.

The field names are the keys of `run --json` and of the database; `docs/trace-format.md` explains them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any, Literal

from decodescope.errors import InputError

FinishReason = Literal["stop", "length", "interrupted", "error"]
Action = Literal["warn", "stop", "temperature", "release"]  # what a guard does; release: back to the run's own
Value = float | int | bool | str | None
HELD = ("dtype", "cache_dtype", "weights")  # of a run; settings of forks that were computed in others
GUARDS = "guards"  # the one setting that is none of sampling: the rules as they were given, spaces between them


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
    value: Value
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
    cache_dtype: str | None = None  # what keys and values were held in, where it was not `dtype`
    weights: str | None = None  # what matrices were held in, where it was not `dtype`: packed, float16, int8 ...

    @property
    def sampling(self) -> dict[str, Value]:
        """The sampling settings by name."""
        return {each.name: each.value for each in self.settings if each.name != GUARDS}

    @property
    def guards(self) -> tuple[str, ...]:
        """The rules of its guards."""
        given = next((each.value for each in self.settings if each.name == GUARDS), None)
        return tuple(str(given or "").split())


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
    """One sampler stage: what it left. `kept_mass` is of the distribution that entered the stage.

    `probs` are those of the step's candidates after this stage, in their order, 0 when removed: as many as
    there are candidates, or none where they were not asked for.
    """

    name: str
    settings: dict[str, Any]
    survivors: int
    kept_mass: float
    entropy_nats: float
    probs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Intervention:
    """What a guard did after a step: it measured something, compared it with `threshold`, and acted.

    Both are nats for the guards of entropy, repeated tokens for the loop guard. `temperature` is in force from
    the next step on, None where the action leaves it as it is.
    """

    guard: str  # loop, entropy, high_entropy
    action: Action
    measured: float
    threshold: float
    temperature: float | None


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

    `mass_above` is the final probability of all tokens with a higher final logit than the chosen one: the draw
    fell on the cumulative bar between it and `mass_above + prob_final`. None where nothing was drawn.
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
    mass_above: float | None = None
    interventions: tuple[Intervention, ...] = ()


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
    stop_guard: str | None = None  # the guard that ended it: see `ends.stopping_guard`


@dataclass(frozen=True, slots=True)
class Branch:
    """A fork of the run: where it leaves an earlier path, under which settings, and how it ended."""

    step: int  # the first one that is the fork's own
    settings: tuple[Setting, ...]  # what differs from the run's
    started_at: str  # ISO 8601, UTC
    end: End  # its `node` is the branch's last (None: no token)


@dataclass(slots=True, repr=False)
class Trace:
    """A whole run: its header, the steps of every branch in the order they were made, its end, its forks.

    `end`, `path`, `token_ids` and `text` are those of the run itself, whatever was forked from it later; the
    steps of a fork are `path_to(trace.steps, branch.end.node)`.
    """

    run: Run
    steps: list[Step] = field(default_factory=list)
    end: End | None = None
    branches: list[Branch] = field(default_factory=list)
    forker: "Callable[..., Trace] | None" = field(default=None, compare=False)  # of the session that made it
    root: Run | None = field(default=None, compare=False)  # of a fork: the header of the run it belongs to

    def fork(self, step: int, token: str | int | None = None, **changes: Any) -> "Trace":
        """Go back to `step` and on from there with another token: see `Session.fork`.

        Raises InputError for a trace that was not made by a session of this process.
        """
        if self.forker is None:
            raise InputError("fork.no_session")
        return self.forker(self, step, token, **changes)

    def branch(self, number: int) -> "Trace":
        """The trace of one fork, counted from 1: its end is the fork's, its header has the fork's settings.

        Raises InputError for a number that no fork has.
        """
        if not 1 <= number <= len(self.branches):
            raise InputError("trace.no_branch", number=number, count=len(self.branches))
        root, fork = self.root or self.run, self.branches[number - 1]
        settings = {each.name: each for each in (*root.settings, *fork.settings)}
        held: dict[str, Any] = {name: settings.pop(name).value for name in HELD if name in settings}
        run = replace(root, settings=tuple(settings.values()), **held)
        return Trace(run, self.steps, fork.end, self.branches, self.forker, root)

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
        return self.end.text if self.end else "".join(step.delta_text for step in self.path())

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
