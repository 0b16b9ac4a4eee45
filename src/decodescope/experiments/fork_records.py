"""What a fork of a run leaves behind: frozen records, units in the field names."""

from dataclasses import dataclass

from decodescope.trace.records import FinishReason, Setting


@dataclass(frozen=True, slots=True)
class BranchToken:
    """One token of a branch; probability and log-probability under the raw model."""

    step: int
    token_id: int
    text: str
    prob: float
    logprob_nats: float
    forced: bool  # laid down by hand


@dataclass(frozen=True, slots=True)
class Verification:
    """A branch beside a fresh prefill of its prompt and tokens: raw logits of the recorded candidates.

    `differences` has the largest one of each of its own steps, `best_differs_at` the steps whose most probable
    token is another one there. The branch agrees where no difference is above `tolerance`; within it a close race
    may still go to another token.
    """

    compared: int  # logits
    differences: tuple[float, ...]
    largest_difference: float
    tolerance: float  # of the dtype, for logits of this size
    best_differs_at: tuple[int, ...]
    agrees: bool


@dataclass(frozen=True, slots=True)
class ForkedBranch:
    """One branch, with the tokens that are its own; log-probabilities under the raw model.

    `number` is its place among the forks of the run, from 1. `parts_at` is the first step at which it has another
    token than the run; None where one is the beginning of the other.
    """

    number: int
    step: int
    tokens: tuple[BranchToken, ...]
    text: str  # of the whole branch
    own_text: str
    logprob_nats: float  # of all its tokens, from the first of the run
    own_logprob_nats: float
    parts_at: int | None
    finish_reason: FinishReason
    error: str | None
    ttft_s: float | None  # reading the past, where that was needed, and the first choice
    decode_tokens_per_s: float | None
    verification: Verification | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its own tokens."""
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class ForkReport:
    """Forks of one run at one step, made as one batch.

    The cache at its largest: `shared_bytes` is the past, held once for all branches, `added_bytes` what they hold
    beside it, room not yet used included. `reused_tokens` of the past were in a cache already, the others were
    read again. `seconds` is reading and decoding, without loading or verifying.
    """

    model: str
    dtype: str
    device: str
    trace: str | None
    step: int
    past_tokens: int  # prompt and the tokens before `step`
    reused_tokens: int
    settings: tuple[Setting, ...]  # what differs from the run's
    branches: tuple[ForkedBranch, ...]
    shared_bytes: int
    added_bytes: int
    seconds: float
