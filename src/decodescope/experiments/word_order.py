"""Where word order comes from: the same tokens in two orders, with and without rotation, with and without the
causal mask, through the model's own blocks.

Both orders end with the same token, whose row is compared; the rows before it are compared token by token. A
token that sees the same set of others, none of them with a position, cannot know their order: attention is a sum
over them (https://arxiv.org/abs/1706.03762, section 3.5). A causal mask alone gives it away one layer later
(https://arxiv.org/abs/2203.16634).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from decodescope.experiments.rope_records import OrderedTokens, OrderSeen, RowsApart, WordOrder
from decodescope.model.decoder import CausalLM, Rotary
from decodescope.model.mask import Mask, build_masks
from decodescope.model.rope import rotary_table
from decodescope.session import Session

TEXTS, END = ("我打你", "你打我"), "。"
APART = 100.0  # times the noise
Ids = list[int]


class Way(NamedTuple):
    """What is switched on."""

    rotation: bool
    causal: bool


WAYS = tuple(Way(rotation, causal) for rotation in (False, True) for causal in (False, True))


def compare_orders(session: Session) -> WordOrder:
    """The two orders in all four ways. The model is driven block by block and stays as it is."""
    tokenizer = session.tokenizer
    orders, by_character = spell_orders(tokenizer.encode)
    fixed = tokenizer.encode(END)
    whole = [ids + fixed for ids in orders]
    depth = session.model.config.num_hidden_layers
    return WordOrder(
        orders=(_ordered(session, TEXTS[0], whole[0]), _ordered(session, TEXTS[1], whole[1])),
        fixed=len(fixed),
        by_character=by_character,
        depths=tuple(sorted({1, min(2, depth), depth})),
        ways=_ways(session, whole),
    )


def _ordered(session: Session, text: str, ids: Ids) -> OrderedTokens:
    return OrderedTokens(text + END, tuple(ids), tuple(map(session.tokenizer.token_text, ids)))


def spell_orders(encode: Callable[[str], Ids]) -> tuple[list[Ids], bool]:
    """The ids of both texts, the same ones in another order; and whether they had to go in character by character,
    because a token spans characters that stand beside each other in only one of them."""
    whole = [encode(text) for text in TEXTS]
    if sorted(whole[0]) == sorted(whole[1]):
        return whole, False
    return [[token_id for character in text for token_id in encode(character)] for text in TEXTS], True


def counterparts(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """For every place of `first` the place of the same token in `second`; of equal tokens in their order."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, token_id in enumerate(second):
        places[token_id].append(place)
    return [places[token_id].pop(0) for token_id in first]


@torch.inference_mode()
def _ways(session: Session, orders: list[Ids]) -> tuple[OrderSeen, ...]:
    moved = counterparts(*orders)
    apart, resid = [], torch.empty(0)
    for resid in _after_each_layer(session.model, orders):
        apart.append(_apart(resid, moved))
    return tuple(
        _seen(session, way, of_way, at_end)
        for way, of_way, at_end in zip(WAYS, torch.stack(apart, dim=1), resid, strict=True)
    )


def _after_each_layer(model: CausalLM, orders: list[Ids]) -> Iterator[Float[Tensor, "4 3 T D"]]:
    """The residual stream of all ways after every layer: both orders, and the first one jittered; in one batch."""
    ids = torch.tensor([*orders, orders[0]], device=model.rope_frequencies.device)
    embed = model.model.embed_tokens(ids).float()  # 3 T D
    embed[2] *= 1 + torch.finfo(torch.float32).eps * _signs(embed[2])
    resid = embed.repeat(len(WAYS), 1, 1)  # 12 T D
    rotary, masks = _rotary(model, ids), _masks(model, ids)
    for block, mask in zip(model.model.layers, masks, strict=True):
        resid = block(resid, rotary, mask, None)  # in float32, whatever the weights are held in
        yield resid.unflatten(0, (len(WAYS), -1))


def _signs(x: Tensor) -> Tensor:
    """+1 and -1 by turns."""
    return 1.0 - 2.0 * (torch.arange(x.numel(), device=x.device) % 2).view_as(x)


def _rotary(model: CausalLM, ids: Tensor) -> Rotary:
    """The model's own tables; without rotation every token stands at position 0, where no pair has turned."""
    rotates = torch.tensor([way.rotation for way in WAYS], device=ids.device).repeat_interleave(len(ids))
    positions = torch.arange(ids.shape[1], device=ids.device) * rotates[:, None]  # 12 T
    return rotary_table(model.rope_frequencies, positions, model.rope_factor, torch.float32)


def _masks(model: CausalLM, ids: Tensor) -> list[Mask]:
    """The model's own masks, layer by layer; without the causal mask everything is visible."""
    free = torch.tensor([not way.causal for way in WAYS], device=ids.device).repeat_interleave(len(ids))  # 12
    padding = torch.zeros(len(free), dtype=torch.long, device=ids.device)  # none, but each row gets its own mask
    causal = build_masks(model.config, ids.shape[1], 0, padding, ids.device)
    return [_opened(mask, free) for mask in causal]


def _opened(mask: Mask, free: Bool[Tensor, " N"]) -> Mask:
    assert mask.visible is not None  # padding asks for a tensor
    return Mask(visible=mask.visible | free[:, None, None, None])


def _apart(resid: Float[Tensor, "4 3 T D"], moved: list[int]) -> Float[Tensor, "4 2 T"]:
    """How far each row is from its counterpart in the other order, and from itself jittered."""
    first = resid[:, :1]  # 4 1 T D
    others = torch.stack((resid[:, 1, moved], resid[:, 2]), dim=1)  # 4 2 T D
    largest = torch.maximum(first.norm(dim=-1), others.norm(dim=-1)).clamp(min=torch.finfo(torch.float32).tiny)
    apart: Tensor = (first - others).norm(dim=-1) / largest
    return apart.cpu()


def _seen(session: Session, way: Way, apart: Float[Tensor, "L 2 T"], resid: Float[Tensor, "3 T D"]) -> OrderSeen:
    model = session.model
    final = resid[:2, -1].to(model.dtype)  # 2 D
    chosen = model.lm_head(model.model.norm(final)).argmax(-1).tolist()
    first, second = map(session.tokenizer.token_text, chosen)
    return OrderSeen(
        rotation=way.rotation,
        causal=way.causal,
        last=_rows(apart[:, :, -1:]),
        others=_rows(apart[:, :, :-1]),
        next_token_ids=(chosen[0], chosen[1]),
        next_texts=(first, second),
    )


def _rows(apart: Float[Tensor, "L 2 R"]) -> RowsApart:
    """The worst of some rows."""
    by_layer, noise = apart.amax(-1).unbind(1)  # L
    layers = (by_layer > APART * noise).nonzero()
    return RowsApart(tuple(by_layer.tolist()), tuple(noise.tolist()), int(layers[0]) + 1 if len(layers) else None)
