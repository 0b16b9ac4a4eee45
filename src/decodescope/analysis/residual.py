"""What a layer does to the residual stream: how much it grows, how far it turns, and which half adds more."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

STREAM = ("attn_out", "mlp_out", "resid_pre", "resid_mid", "resid_post")  # the sites it is read off, as they come


@dataclass(frozen=True, slots=True)
class StreamChange:
    """One layer in one step; each figure is the median over the step's positions.

    The median, since in many models the first position carries hundred times the norm of the others and would be
    all that a mean shows. `growth` is ||resid_post|| / ||resid_pre||; `cosine` that of the angle between the two;
    `attention_ratio` is ||attn_out|| / ||resid_pre|| and `mlp_ratio` ||mlp_out|| / ||resid_mid||: what each half
    adds to the stream it finds; `attention_share` is ||attn_out|| / (||attn_out|| + ||mlp_out||).
    """

    step: int
    layer: int
    norm_before: float
    norm_after: float
    growth: float
    cosine: float
    attention_ratio: float
    mlp_ratio: float
    attention_share: float


def stream_rows(
    *,
    attn_out: Float[Tensor, "T D"],
    mlp_out: Float[Tensor, "T D"],
    resid_pre: Float[Tensor, "T D"],
    resid_mid: Float[Tensor, "T D"],
    resid_post: Float[Tensor, "T D"],
) -> Float[Tensor, "7 T"]:
    """The figures of a `StreamChange` at every position, in the order of its fields.

    In float64, where the device has it: squares overflow 16 bits and, of a faulty stream, 32 as well.
    """
    wide = torch.float32 if resid_pre.device.type == "mps" else torch.float64
    before, after = resid_pre.to(wide), resid_post.to(wide)
    attention, mlp = attn_out.to(wide).norm(dim=-1), mlp_out.to(wide).norm(dim=-1)
    norm_before, norm_after = before.norm(dim=-1), after.norm(dim=-1)
    figures = (
        norm_before,
        norm_after,
        norm_after / norm_before,
        (before * after).sum(-1) / (norm_before * norm_after),
        attention / norm_before,
        mlp / resid_mid.to(wide).norm(dim=-1),
        attention / (attention + mlp),
    )
    return torch.stack(figures)


def stream_change(step: int, layer: int, rows: Float[Tensor, "7 T"]) -> StreamChange:
    """A layer's medians; of an even number of positions the lower one. NaN where a position has one."""
    return StreamChange(step, layer, *rows.median(dim=1).values.tolist())
