"""Attention's one step: softmax(q k^T / sqrt(d)) v over all that is held, by torch's kernel or by our own.

A few new positions over a long cache read it once with our kernel (`kernels.attention`), as it is stored. All else
is torch's: long inputs, other devices, and short caches, where ours is no faster and torch's numbers are those of
transformers bit by bit.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from decodescope.model.cache_formats import Held
from decodescope.model.kernels import attends, cached_attention, cached_attention_of_rows
from decodescope.model.mask import Mask
from decodescope.model.ragged import HeldRows

KeysOrValues = Tensor | Held | HeldRows

# Positions from which on a single query is faster with ours, where both could read what is held.
_FROM = {torch.float32: 256, torch.bfloat16: 256, torch.float16: 128}


def attend(
    q_rot: Float[Tensor, "B H T d"], keys: KeysOrValues, values: KeysOrValues, mask: Mask
) -> Float[Tensor, "B H T d"]:
    """What every query head finds, in the dtype of the queries; keys and values [B, K, S, d], or of each row its
    own (S may differ) for one new token a row."""
    if isinstance(keys, HeldRows) and isinstance(values, HeldRows):
        return _of_rows(q_rot, keys.rows, values.rows, mask)
    assert not isinstance(keys, HeldRows) and not isinstance(values, HeldRows)
    if isinstance(keys, Held) and isinstance(values, Held) and _ours(q_rot, keys, mask):
        return cached_attention(keys.facing(q_rot), keys, values, mask.visible).to(q_rot.dtype)
    plain_keys, plain_values = _plain(keys, q_rot), _plain(values, q_rot)
    return F.scaled_dot_product_attention(
        q_rot, plain_keys, plain_values, attn_mask=mask.visible, is_causal=mask.is_causal, enable_gqa=True
    )


def _of_rows(q_rot: Tensor, keys: tuple[Held, ...], values: tuple[Held, ...], mask: Mask) -> Tensor:
    """By our kernel wherever it can be had, however short the rows are: one call is faster than one for each."""
    masks = [mask.of_row(row, held.positions) for row, held in enumerate(keys)]
    if attends(q_rot, keys[0]):
        visible = [each.visible for each in masks]
        return cached_attention_of_rows(keys[0].facing(q_rot), keys, values, visible).to(q_rot.dtype)
    return torch.cat([attend(q_rot[b : b + 1], keys[b], values[b], mask) for b, mask in enumerate(masks)])


def _plain(held: Tensor | Held, like: Tensor) -> Tensor:
    """As one tensor in the dtype of `like` (asked first: a `to` with nothing to do takes microseconds)."""
    plain = held if isinstance(held, Tensor) else held.plain()
    return plain if plain.dtype == like.dtype else plain.to(like.dtype)


def _ours(q_rot: Float[Tensor, "B H T d"], keys: Held, mask: Mask) -> bool:
    if mask.is_causal:
        return False
    if keys.dtype == q_rot.dtype and (q_rot.shape[2] > 1 or keys.positions < _FROM.get(q_rot.dtype, math.inf)):
        return False
    return attends(q_rot, keys)
