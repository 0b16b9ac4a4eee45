"""Rotary positions of an open model: frequencies, the angles at a position, and the law of the distance.

RoPE (https://arxiv.org/abs/2104.09864) turns pair i of q at m and of k at n by m * f_i and n * f_i; a dot product
does not change when both sides turn, so what is left of it depends on m - n alone.
"""

import math
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.analysis.attention import kv_head_of
from decodescope.errors import InputError
from decodescope.experiments.rope_records import DistanceLaw, DistanceRow, RopePair, RopeReport
from decodescope.experiments.word_order import compare_orders
from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.rope import RopeConfig, inverse_frequencies, rotary_table, rotate
from decodescope.observe.recording import Watch
from decodescope.session import Session
from decodescope.text.chat import Prompt

LAST_POSITION = 2**24 - 1  # float32, in which angles are made, counts no further
DISTANCES = (0, 1, 2, 3, 8, 32, 128, 1024, 8192)
STARTS = (0, 1, 10, 100, 1000, 10000)
_EXACT = 1e-9  # of the largest possible product: far above float64's rounding, far below float32's
_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopePlan:
    """At which position the angles are shown (None: the prompt's last), and whose q and k are multiplied."""

    position: int | None = None
    layer: int = 0
    head: int = 0


def study_rope(session: Session, prompt: Prompt, plan: RopePlan) -> RopeReport:
    """Frequencies and angles, the distance law on the q and k of the prompt's last token, and the experiment on
    word order. Raises InputError for a position, layer or head that is none.
    """
    model, position = session.model, len(prompt.tokens) - 1 if plan.position is None else plan.position
    check_plan(model.config, plan)
    rope = model.config.rope
    pairs = rope_pairs(model, position)
    return RopeReport(
        position=position,
        context=model.config.max_position_embeddings,
        head_dim=model.config.head_dim,
        theta=rope.theta,
        kind=rope.kind,
        settings={name: float(value) for name, value in asdict(rope).items() if name in _SETTINGS[rope.kind]},
        divisors=rope.divisors is not None,
        attention_factor=model.rope_factor,
        kept=sum(pair.slowed == 1.0 for pair in pairs),
        slowed_most=max(pair.slowed for pair in pairs),
        pairs=pairs,
        law=measure_law(session, prompt, plan),
        word_order=compare_orders(session),
    )


def check_plan(config: ModelConfig, plan: RopePlan) -> None:
    """Raises InputError for a position, layer or head that is none."""
    if plan.position is not None and not 0 <= plan.position <= LAST_POSITION:
        raise InputError("rope.position", value=plan.position, last=LAST_POSITION)
    if not 0 <= plan.layer < config.num_hidden_layers:
        raise InputError("observe.no_layer", layer=plan.layer, last=config.num_hidden_layers - 1)
    if not 0 <= plan.head < config.num_attention_heads:
        raise InputError("rope.head", head=plan.head, last=config.num_attention_heads - 1)


def rope_pairs(model: CausalLM, position: int) -> tuple[RopePair, ...]:
    """Every pair of a head at `position`, with the frequencies and the table that the model uses."""
    frequencies = model.rope_frequencies.cpu()  # d/2
    plain, _ = inverse_frequencies(RopeConfig(theta=model.config.rope.theta), model.config.head_dim)
    at = torch.tensor([[position]])
    cos, sin = (part[0, 0, 0] for part in rotary_table(frequencies, at, model.rope_factor, torch.float32))  # d
    angles = position * frequencies
    columns = (frequencies, plain, plain / frequencies, angles, cos, sin)
    half = len(frequencies)
    return tuple(_pair(i, half, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=False)))


def _pair(i: int, half: int, frequency: float, plain: float, slowed: float, *at_position: float) -> RopePair:
    angle, cos, sin = at_position
    turns = angle / math.tau
    return RopePair(
        pair=i,
        first=i,
        second=i + half,
        frequency=frequency,
        plain_frequency=plain,
        slowed=slowed,
        wavelength_tokens=math.tau / frequency,
        angle_radians=angle,
        turns=turns,
        turn=turns % 1.0,
        cos=cos,
        sin=sin,
    )


def measure_law(session: Session, prompt: Prompt, plan: RopePlan) -> DistanceLaw:
    """The q and the k of the prompt's last token in one head, multiplied at many distances from many starts."""
    config, last = session.model.config, len(prompt.tokens) - 1
    kv_head = kv_head_of(plan.head, config.num_attention_heads, config.num_key_value_heads)
    q, k = _query_and_key(session, prompt, plan, kv_head)
    norms = float(q.norm() * k.norm()) * session.model.rope_factor**2
    starts = tuple(n for n in STARTS if n < config.max_position_embeddings)
    distances = [m for m in DISTANCES if m < config.max_position_embeddings]
    rows = tuple(_row(session.model, q, k, distance) for distance in distances)
    worst = max(row.spread_float64 for row in rows)
    return DistanceLaw(
        layer=plan.layer,
        head=plan.head,
        kv_head=kv_head,
        position=last,
        token_id=prompt.tokens[last].id,
        text=prompt.tokens[last].text,
        unrotated=float(q @ k),
        norms=norms,
        starts=starts,
        rows=rows,
        spread=max(row.spread for row in rows),
        spread_float64=worst,
        holds=worst <= _EXACT * norms,
    )


def _query_and_key(
    session: Session, prompt: Prompt, plan: RopePlan, kv_head: int
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """What enters the rotation at the prompt's last position, in float64."""
    sites = ("q_norm", "k_norm") if session.model.config.qk_norm else ("q", "k")
    names = [f"layers.{plan.layer}.{site}" for site in sites]
    with session.watching(Watch(names, positions=(len(prompt.tokens) - 1,))) as recording:
        session.run(prompt, max_new_tokens=1)
    q, k = (recording[name][0][:, 0].double() for name in names)
    return q[plan.head], k[kv_head]


def _row(model: CausalLM, q: Float[Tensor, " d"], k: Float[Tensor, " d"], distance: int) -> DistanceRow:
    context = model.config.max_position_embeddings
    starts = torch.tensor([n for n in STARTS if n + distance < context])
    products = _products(model, q.float(), k.float(), starts, distance)
    exact = _products(model, q, k, starts, distance)
    return DistanceRow(distance, tuple(products.tolist()), _spread(products), _spread(exact))


def _products(
    model: CausalLM, q: Float[Tensor, " d"], k: Float[Tensor, " d"], starts: Tensor, distance: int
) -> Float[Tensor, " N"]:
    """q turned to start + distance times k turned to start, all in the dtype of q."""
    frequencies = model.rope_frequencies.to("cpu", q.dtype)

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        # One axis more than a head needs: B H T d.
        rows = x.expand(1, 1, len(positions), -1)
        return rotate(rows, rotary_table(frequencies, positions[None], model.rope_factor, q.dtype))[0, 0]

    products: Tensor = (turned(q, starts + distance) * turned(k, starts)).sum(-1)
    return products


def _spread(values: Float[Tensor, " N"]) -> float:
    return float(values.max() - values.min())
