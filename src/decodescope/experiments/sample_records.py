"""What settings side by side leave behind: frozen records, units in the field names, no torch.

Entropy and log-probability are those of the raw model, whatever the settings made of its distribution.
"""

from dataclasses import dataclass
from typing import Literal

from decodescope.analysis.repeats import Loop
from decodescope.trace.records import FinishReason

Value = float | int | str | None

# Why a row did not choose the first row's token, the same tokens before it:
# removed       a stage of this row had removed it
# lowered       this row takes the highest logit, and a penalty put another token above it
# highest       this row takes the highest logit, which that token did not have
# drawn         this row draws, the first one took the highest
# other_seed    both draw, with other random numbers
# other_probs   both draw, with the same random numbers from other probabilities
# by_hand       the other token was laid down by hand
Cause = Literal["removed", "lowered", "highest", "drawn", "other_seed", "other_probs", "by_hand"]


@dataclass(frozen=True, slots=True)
class Parting:
    """The step at which a row first chooses another token than the first row; all numbers are of that step.

    `prob_raw` is the model's probability of a token, `prob_here` the one after this row's stages (0: removed),
    `prob_there` the one after the first row's. `stage` is what removed or lowered the first row's token here.
    `repaired_by` are the settings which, each alone set as in the first row, would have given its token here.
    """

    step: int
    token_id: int
    text: str | None  # None: nobody is there who knows it
    prob_raw: float
    prob_here: float
    prob_there: float
    first_token_id: int
    first_text: str | None
    first_prob_raw: float
    first_prob_here: float
    first_prob_there: float
    cause: Cause
    stage: str | None
    repaired_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One setting with one seed (None: nothing was drawn).

    `stages` are those in force, in order. The means are over all steps, None where there are none; distinct-n and
    repetition rate as in `analysis.repetition`. Of a re-rolled run everything is said of the `exact_steps` that
    are the run's own too, and the first row is the run itself; None where the model ran. A `finish_reason` of
    None: what would follow is not known.
    """

    name: str  # as the settings were asked for
    settings: dict[str, Value]
    stages: tuple[str, ...]
    seed: int | None
    token_ids: tuple[int, ...]
    text: str
    parts_at: int | None
    parting: Parting | None
    entropy_nats_mean: float | None
    logprob_nats_mean: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repetition_rate: float | None
    loop: Loop | None
    finish_reason: FinishReason | None
    exact_steps: int | None
    entropy_nats: tuple[float, ...]  # by step
    logprob_nats: tuple[float, ...]  # by step, of the chosen token
    top_prob: tuple[float, ...]  # by step, of the most probable token


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation (the population's) over the rows that have the figure."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """One setting over its seeds. The figures by step are means over the rows that came so far."""

    name: str
    settings: dict[str, Value]
    seeds: int
    entropy_nats: Spread | None
    logprob_nats: Spread | None
    distinct_2: Spread | None
    repetition_rate: Spread | None
    loop_share: float
    entropy_nats_by_step: tuple[float, ...]
    top_prob_by_step: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Settings side by side, as far as they have come (`complete`).

    `seconds` is prefill and decoding, loading left out. `from_run` is the folder of a run that was re-rolled from
    its stored logits.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    prompt: str  # as it went in
    prompt_tokens: int
    max_new_tokens: int
    from_run: str | None
    kept_steps: int | None  # of `from_run`, from its first on: those with stored logits
    notes: tuple[str, ...]  # things the reader should know: catalogue keys
    rows: tuple[SampleRow, ...]
    summary: tuple[SettingSummary, ...]
    seconds: float
    complete: bool
