"""What a study of the rotary positions leaves behind: frozen records, units in the field names, no torch.

Differences are norm-wise and relative: ||a - b|| / max(||a||, ||b||); layers are counted from 1 (after how many).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopePair:
    """Pair `pair` of a head turns units `first` and `second` together, `frequency` radians per token.

    `plain_frequency` is what theta alone gives and `slowed` how many times it is divided. `cos` and `sin` are the
    table's at the position of the report, attention factor included; `turn` is the angle's fraction of a turn.
    """

    pair: int
    first: int
    second: int
    frequency: float
    plain_frequency: float
    slowed: float
    wavelength_tokens: float
    angle_radians: float
    turns: float
    turn: float
    cos: float
    sin: float


@dataclass(frozen=True, slots=True)
class DistanceRow:
    """q at n + distance times k at n, for every start n of the law that lies within the context.

    `products` are made with the model's float32 angles and `spread` is their largest less their least;
    `spread_float64` the same with angles in float64.
    """

    distance: int
    products: tuple[float, ...]
    spread: float
    spread_float64: float


@dataclass(frozen=True, slots=True)
class DistanceLaw:
    """One query and one key of the model (`token_id` at `position` of the prompt), put at many places.

    `unrotated` is their product before rotation and `norms` the product of their lengths, the largest that a
    product can be. `holds`: in float64 no row varies by more than 1e-9 of it.
    """

    layer: int
    head: int
    kv_head: int
    position: int
    token_id: int
    text: str
    unrotated: float
    norms: float
    starts: tuple[int, ...]
    rows: tuple[DistanceRow, ...]
    spread: float  # the worst of the rows
    spread_float64: float
    holds: bool


@dataclass(frozen=True, slots=True)
class OrderedTokens:
    """One word order as it went in: raw ids, the last `fixed` of them the same in both orders."""

    text: str
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowsApart:
    """How far the two orders are apart in one kind of row, after each layer.

    `noise` is what moving every number of the embedding by one float32 step does to the same row. `from_layer`:
    the first layer after which they are apart by more than 100 times that; None where no layer tells them apart.
    """

    by_layer: tuple[float, ...]
    noise: tuple[float, ...]
    from_layer: int | None


@dataclass(frozen=True, slots=True)
class OrderSeen:
    """One of the four ways: `last` is the last row, whose token is the same in both orders; `others` the worst of
    the rows before it, each compared with the row of the same token in the other order."""

    rotation: bool
    causal: bool
    last: RowsApart
    others: RowsApart
    next_token_ids: tuple[int, int]  # the most probable ones, of both orders
    next_texts: tuple[str, str]


@dataclass(frozen=True, slots=True)
class WordOrder:
    """Two orders of the same tokens, with and without rotation, with and without the causal mask.

    The layers are computed in float32, the next tokens in the model's dtype. `by_character`: the texts as a whole
    were not the same tokens in another order, so they went in character by character.
    """

    orders: tuple[OrderedTokens, OrderedTokens]
    fixed: int
    by_character: bool
    depths: tuple[int, ...]  # 1, 2 and all layers
    ways: tuple[OrderSeen, ...]


@dataclass(frozen=True, slots=True)
class RopeReport:
    """The rotary positions of a model: its frequencies, the angles at `position`, the distance law, word order.

    `settings` are those of the scaling `kind`; `divisors`: the file brings factors of its own that divide the
    frequencies; `attention_factor` multiplies cos and sin. `kept` pairs have the frequency of theta alone.
    """

    position: int
    context: int
    head_dim: int
    theta: float
    kind: str
    settings: dict[str, float]
    divisors: bool
    attention_factor: float
    kept: int
    slowed_most: float
    pairs: tuple[RopePair, ...]
    law: DistanceLaw
    word_order: WordOrder
