"""What the logit lens leaves behind: frozen records, units in the field names, no torch.

Probabilities are raw ones, ranks count from 1. A choice is the token that the run chose behind a position; at
earlier positions of the prompt, where it chose none, the one that its logits put first.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LensToken:
    """A token and its name."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class LensCandidate:
    """A token that a layer would have said."""

    token_id: int
    text: str
    prob: float


@dataclass(frozen=True, slots=True)
class LensLayer:
    """What one layer would have said, most probable first.

    `kl_nats` is KL(run || layer): how far its distribution is from the one of the run's own logits. The fields
    of the target are None where none was given.
    """

    layer: int
    top: tuple[LensCandidate, ...]
    entropy_nats: float
    kl_nats: float
    choice_rank: int
    choice_prob: float
    choice_logprob_nats: float
    target_rank: int | None
    target_prob: float | None
    target_logprob_nats: float | None


@dataclass(frozen=True, slots=True)
class LayerShare:
    """What one layer writes into the logit: `head_logits` by query head, with `bias_logit` (None where the output
    projection has none) they are the attention's."""

    layer: int
    attention_logit: float
    mlp_logit: float
    head_logits: tuple[float, ...]
    bias_logit: float | None


@dataclass(frozen=True, slots=True)
class HeadShare:
    """What one query head writes into the logit, and whose keys and values it reads."""

    layer: int
    head: int
    kv_head: int
    logit: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where a token's logit comes from, the last norm's scale frozen (see `analysis.attribution`).

    `run_logit` is the run's own; `total_logit` is embedding, attention and MLP of all layers together, and
    `error_logit` how far it is from the run's. `heads_error_logit`: the same between heads and their block, the
    worst layer's. `norm_scale` is 1 / sqrt(mean(x^2) + eps). `strongest_heads`: by size, whatever the sign.
    """

    token_id: int
    text: str
    run_logit: float
    total_logit: float
    error_logit: float
    heads_error_logit: float
    norm_scale: float
    embed_logit: float
    layers: tuple[LayerShare, ...]
    strongest_heads: tuple[HeadShare, ...]


@dataclass(frozen=True, slots=True)
class LensPosition:
    """One position: its own token, the choice behind it, and what every layer would have said.

    `step` is the generated token that the pass leads to, 0 for the pass over the prompt; `chosen`: the run really
    chose there. `next_token` really follows. `first_layer` is the first one with the choice at the top,
    `stays_from_layer` the first from which it is there to the end (None: not so).
    """

    step: int
    position: int
    token_id: int
    text: str
    choice: LensToken
    choice_prob: float  # by the run's own logits
    chosen: bool
    next_token: LensToken
    first_layer: int | None
    stays_from_layer: int | None
    target_first_layer: int | None
    target_stays_from_layer: int | None
    last_layer_error: float
    layers: tuple[LensLayer, ...]
    attribution: Attribution


@dataclass(frozen=True, slots=True)
class LensReport:
    """A run through the lens. `last_layer_error`: the largest difference between the lens's logits at the last
    layer, which are float32, and the run's own."""

    model: str
    architecture: str
    dtype: str
    device: str
    prompt: tuple[LensToken, ...]
    notes: tuple[str, ...]  # things the reader should know: catalogue keys
    target: LensToken | None
    last_layer: int
    last_layer_error: float
    positions: tuple[LensPosition, ...]
