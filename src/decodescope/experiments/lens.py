"""The logit lens on a run: a prompt, perhaps some generated tokens, and what every layer would have said."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.analysis.lens import (
    Reading,
    TokenPath,
    first_nonfinite,
    largest_difference,
    read_positions,
)
from decodescope.errors import FindingError, InputError
from decodescope.experiments.lens_attribution import attribute, kept_rows, unembedding_of
from decodescope.experiments.lens_records import (
    Attribution,
    LensCandidate,
    LensLayer,
    LensPosition,
    LensReport,
    LensToken,
)
from decodescope.experiments.positions import select_positions
from decodescope.model.checkpoint import Progress
from decodescope.observe.recording import DEFAULT_BUDGET, Recording, Watch
from decodescope.observe.selection import select_layers
from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.text.chat import Prompt
from decodescope.trace.records import Trace

KEPT = ("embed", "z", "attn_out", "mlp_out", "resid_post", "logits")
_SAID_ELSEWHERE = {"note.observed"}  # the lens tells no times


@dataclass(frozen=True, slots=True)
class LensPlan:
    """Where to look, in words as on the command line (see `positions`, `observe.selection.select_layers`).

    The positions that lead to `steps` generated tokens are looked at, too. `layers` are those told of, `top` is
    how many tokens of each. `target` is the text of one token, or an id. Raises InputError for numbers that
    cannot be.
    """

    positions: Sequence[str] = ()
    steps: int = 0
    layers: Sequence[str] = ()
    top: int = 5
    target: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InputError("steps", value=self.steps)
        if self.top < 1:
            raise InputError("lens.top", value=self.top)


@dataclass(frozen=True, slots=True)
class _Look:
    """A finished run, the positions that were looked at, and the run's own logits [P, V] there."""

    trace: Trace
    recording: Recording
    positions: Sequence[int]
    sequence: Sequence[int]  # ids of prompt and answer
    logits: Float[Tensor, "P V"]

    @property
    def first_chosen(self) -> int:
        """The first position behind which the run chose a token: the prompt's last."""
        return len(self.trace.run.prompt_tokens) - 1

    def choices(self) -> list[int]:
        """What was chosen behind each position, or stands first where nothing was."""
        tops = self.logits.argmax(-1).tolist()
        pairs = zip(self.positions, tops, strict=True)
        return [self.sequence[p + 1] if p >= self.first_chosen else top for p, top in pairs]


@dataclass(frozen=True, slots=True)
class _Telling:
    """How a position is told of."""

    name: Callable[[int], LensToken]
    target: LensToken | None
    layers: Sequence[int]
    top: int


def study_lens(session: Session, prompt: Prompt, plan: LensPlan, progress: Progress | None = None) -> LensReport:
    """Run the plan, greedily, and read every layer at its positions.

    Raises InputError for positions, layers or a target that cannot be, before the run; FindingError where a
    value is not finite; ResourceError.
    """
    telling = _telling(session, plan)
    look = _look(session, prompt, plan, progress)
    positions = tuple(_positions(session, look, telling))
    run = look.trace.run
    return LensReport(
        model=run.model,
        architecture=run.architecture,
        dtype=run.dtype,
        device=run.device,
        prompt=tuple(LensToken(token.token_id, token.text) for token in run.prompt_tokens),
        notes=tuple(note for note in run.notes if note not in _SAID_ELSEWHERE),
        target=telling.target,
        last_layer=session.model.config.num_hidden_layers - 1,
        last_layer_error=max(position.last_layer_error for position in positions),
        positions=positions,
    )


def find_token(session: Session, word: str) -> int:
    """The id of a text that is one token, or of a number (`id:7`, or `1234` where that is no token).

    Raises InputError that says how the text splits, and for an id that the model does not have.
    """
    ids, rows = session.tokenizer.encode(word), session.model.config.vocab_size
    number = word.removeprefix("id:")
    if len(ids) != 1 and number.isdecimal():
        token_id = int(number[:20])
    elif len(ids) == 1:
        token_id = ids[0]
    else:
        split = " ".join(f'"{session.tokenizer.token_text(token_id)}"' for token_id in ids[:20])
        raise InputError("lens.target", text=word, count=len(ids), split=split)
    if token_id >= rows:
        raise InputError("lens.target_outside", id=token_id, last=rows - 1)
    return token_id


def _telling(session: Session, plan: LensPlan) -> _Telling:
    def name(token_id: int) -> LensToken:
        return LensToken(token_id, session.tokenizer.token_text(token_id))

    target = None if plan.target is None else name(find_token(session, plan.target))
    return _Telling(name, target, sorted(select_layers(session.model.config, plan.layers)), plan.top)


def _look(session: Session, prompt: Prompt, plan: LensPlan, progress: Progress | None) -> _Look:
    """Make the run, keeping what the plan's positions need."""
    last = len(prompt.ids) - 1
    room = max(session.model.config.max_position_embeddings - len(prompt.ids), 1)
    generated = range(last, last + min(plan.steps, room))  # no more than the context has room for
    wanted = select_positions(plan.positions, len(prompt.ids)).union(generated)
    _check_fits(session, len(wanted))
    # Logits of earlier positions of the prompt are only computed where they are looked at.
    options = RunOptions(max_new_tokens=max(plan.steps, 1), candidates=1, every_logit=min(wanted) < last)
    with session.watching(Watch(KEPT, positions=wanted)) as recording:
        live = session.start([prompt], options, progress)
        for _ in live.steps():
            pass
    (trace,) = live.traces
    sequence = [*prompt.ids, *trace.token_ids]
    positions = [position for position in sorted(wanted) if position + 1 < len(sequence)]
    return _Look(trace, recording, positions, sequence, kept_rows(recording, "logits").float())


def _check_fits(session: Session, positions: int) -> None:
    """Raises InputError where what the positions need is more than a recording may keep."""
    config = session.model.config
    heads = config.num_attention_heads * config.head_dim
    values = config.num_hidden_layers * (3 * config.hidden_size + heads) + config.hidden_size + config.vocab_size
    needed = positions * values * session.model.dtype.itemsize
    if needed > DEFAULT_BUDGET:
        raise InputError("lens.too_many", positions=positions, most=DEFAULT_BUDGET * positions // needed)


def _positions(session: Session, look: _Look, telling: _Telling) -> Iterator[LensPosition]:
    layers = session.model.config.num_hidden_layers
    resid = torch.stack([kept_rows(look.recording, f"layers.{i}.resid_post") for i in range(layers)], 1)  # P L D
    choices = [telling.name(token_id) for token_id in look.choices()]
    explained = [telling.target or choice for choice in choices]
    attributions = attribute(session.model, look.recording, explained, look.logits)
    readings = read_positions(resid, unembedding_of(session.model))
    for i, reading in enumerate(readings):
        _check_finite(reading, look.positions[i])
        yield _position(look, i, reading, attributions[i], choices[i], telling)


def _check_finite(reading: Reading, position: int) -> None:
    layer = first_nonfinite(reading.logits)
    if layer is not None:
        raise FindingError("lens.nonfinite", layer=layer, position=position)


def _position(
    look: _Look, i: int, reading: Reading, attribution: Attribution, choice: LensToken, telling: _Telling
) -> LensPosition:
    position, final = look.positions[i], look.logits[i]
    own, following = (telling.name(look.sequence[place]) for place in (position, position + 1))
    path = reading.path(choice.token_id)
    target = reading.path(telling.target.token_id) if telling.target else None
    return LensPosition(
        step=max(position - look.first_chosen, 0),
        position=position,
        token_id=own.token_id,
        text=own.text,
        choice=choice,
        choice_prob=float(final.double().softmax(-1)[choice.token_id]),
        chosen=position >= look.first_chosen,
        next_token=following,
        first_layer=path.first_layer,
        stays_from_layer=path.stays_from_layer,
        target_first_layer=target.first_layer if target else None,
        target_stays_from_layer=target.stays_from_layer if target else None,
        last_layer_error=largest_difference(reading.logits[-1], final),
        layers=tuple(_layers(reading, final, path, target, telling)),
        attribution=attribution,
    )


def _layers(
    reading: Reading, final: Float[Tensor, " V"], path: TokenPath, target: TokenPath | None, telling: _Telling
) -> Iterator[LensLayer]:
    entropies, divergences, tops = reading.entropy_nats(), reading.kl_nats(final), reading.top(telling.top)
    for layer in telling.layers:
        yield LensLayer(
            layer=layer,
            top=tuple(LensCandidate(token_id, telling.name(token_id).text, p) for token_id, p in tops[layer]),
            entropy_nats=entropies[layer],
            kl_nats=divergences[layer],
            choice_rank=path.ranks[layer],
            choice_prob=path.probs[layer],
            choice_logprob_nats=path.logprobs_nats[layer],
            target_rank=target.ranks[layer] if target else None,
            target_prob=target.probs[layer] if target else None,
            target_logprob_nats=target.logprobs_nats[layer] if target else None,
        )
