"""Direct logit attribution: what each part of a model adds to one token's logit.

The stream x that the last norm reads is the sum of what embedding, attention blocks and MLPs wrote into it. With
the norm's scale taken as it is at that position (frozen) a logit is linear in x, and each part has its share

    (head[token] * g / sqrt(mean(x^2) + eps)) · part

(https://transformer-circuits.pub/2021/framework; with a frozen norm in https://arxiv.org/abs/2211.00593). What a
part does by way of later layers is not in its own share but in theirs. P positions, D hidden, H query heads, d
head size. All products are float64, on the CPU.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.analysis.lens import Unembedding


def logit_directions(
    unembedding: Unembedding, token_ids: Sequence[int], resid: Float[Tensor, "P D"]
) -> Float[Tensor, "P D"]:
    """For each position the direction whose product with the stream `resid` is the logit of its token."""
    rows = torch.cat([_exact(unembedding.head[i : i + 1]) for i in token_ids])  # P D
    scale = unembedding.scale(_exact(resid))  # P
    return rows * _exact(unembedding.norm_weight) * scale[:, None]


def part_logits(directions: Float[Tensor, "P D"], part: Float[Tensor, "P D"]) -> Float[Tensor, " P"]:
    """What one part of the stream adds to the logits."""
    return (directions * _exact(part)).sum(-1)


def head_logits(
    directions: Float[Tensor, "P D"], z: Float[Tensor, "H P d"], o_weight: Float[Tensor, "D H*d"]
) -> Float[Tensor, "P H"]:
    """What each head of one attention block adds, through its columns of the output projection: z_h W_O[:, h]."""
    H, _, d = z.shape
    seen = (directions @ _exact(o_weight)).view(-1, H, d)  # the directions as the heads see them
    return (seen * _exact(z).transpose(0, 1)).sum(-1)


def _exact(value: Tensor) -> Tensor:
    return value.to("cpu", torch.float64)
