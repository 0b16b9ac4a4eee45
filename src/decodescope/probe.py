"""The eyepiece: which inner values there are, by name, and how a forward pass shows them to a tap.

A forward function ends with one guarded line that hands over its local variables under their own names:

    if tap is not None:
        show(tap, layer, q=q, k=k, ...)

A tap is asked before anything is copied, and what it does is never looked at: it cannot change a value.
Letters of the shapes: B rows, T new positions, S cached + new, D hidden, H query heads, K key/value heads,
d head size, F MLP width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SHOWN_BLOCK = 2**22  # elements of scores in one block, when rows are recomputed block by block
_SMALL = 400  # multiplications of one matrix of a batch, below which torch does not call its library
_TOGETHER = 8  # rows of a product; a product of one or two takes another routine


@dataclass(frozen=True, slots=True)
class Site:
    """One inner value: `shape` in the letters above, `source` the site it is computed from (the last operand)."""

    name: str
    shape: str
    source: str | None
    per_layer: bool = True
    recomputed: bool = False  # not a value of the run itself: made again from q_rot and the cached keys


# In the order of computation.
SITES = (
    Site("embed", "B T D", None, per_layer=False),
    Site("resid_pre", "B T D", None),
    Site("attn_norm", "B T D", "resid_pre"),
    Site("q", "B H T d", "attn_norm"),
    Site("k", "B K T d", "attn_norm"),
    Site("v", "B K T d", "attn_norm"),
    Site("q_norm", "B H T d", "q"),
    Site("k_norm", "B K T d", "k"),
    Site("q_rot", "B H T d", "q_norm"),
    Site("k_rot", "B K T d", "k_norm"),
    Site("scores", "B H T S", "q_rot", recomputed=True),
    Site("pattern", "B H T S", "scores", recomputed=True),
    Site("z", "B H T d", "v"),
    Site("attn_out", "B T D", "z"),
    Site("resid_mid", "B T D", "attn_out"),
    Site("mlp_norm", "B T D", "resid_mid"),
    Site("gate", "B T F", "mlp_norm"),
    Site("up", "B T F", "mlp_norm"),
    Site("act", "B T F", "up"),
    Site("mlp_out", "B T D", "act"),
    Site("resid_post", "B T D", "mlp_out"),
    Site("final_norm", "B T D", None, per_layer=False),
    Site("logits", "B T V", "final_norm", per_layer=False),
)
BY_NAME = {site.name: site for site in SITES}


@runtime_checkable
class Floats(Protocol):
    """A tensor, or something held in another form that can be read as one."""

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def float(self) -> Tensor:
        """All of it in float32."""


@dataclass(frozen=True, slots=True)
class Attended:
    """What went into the fused kernel of one layer and what came out: scores and pattern are recomputed from it.

    Only the query rows asked for are computed, in float32, whatever the run's dtype. `visible` None means causal
    order: the last row sees every column.
    """

    q_rot: Float[Tensor, "B H T d"]
    keys: Floats  # B K S d, as they are held
    values: Floats  # B K S d
    z: Float[Tensor, "B H T d"]
    visible: Bool[Tensor, "b 1 T S"] | None

    def blocks(self) -> Iterator[slice]:
        """All query rows, cut so that the scores of one block stay within `SHOWN_BLOCK` elements."""
        B, H, T, _ = self.q_rot.shape
        rows = max(SHOWN_BLOCK // (B * H * self.keys.shape[2]), 1)
        return (slice(first, min(first + rows, T)) for first in range(0, T, rows))

    def seen(self, rows: slice) -> Bool[Tensor, "b 1 R S"] | None:
        """Which columns the rows may look at; None where that is all of them."""
        if self.visible is not None:
            return self.visible[:, :, rows]
        T, S = self.q_rot.shape[2], self.keys.shape[2]
        if T == 1:
            return None
        device = self.keys.device
        last_seen = torch.arange(T, device=device)[rows, None] + (S - T)  # R 1
        return (torch.arange(S, device=device) <= last_seen)[None, None]  # 1 1 R S

    def scores(self, rows: slice) -> Float[Tensor, "B H R S"]:
        """q·k / sqrt(d), -inf where a row may not look (https://arxiv.org/abs/1706.03762, eq. 1).

        One head of a group in a product, and never fewer than `_TOGETHER` rows where the pass has them: so the
        kernel rounds. Where scores are large (1,500 in a real model) other rounding alone moves a pattern by 1e-5.
        """
        first, last, _ = rows.indices(self.q_rot.shape[2])
        start = max(min(first, self.q_rot.shape[2] - _TOGETHER), 0)
        q, keys = self.q_rot[:, :, start : max(last, start + _TOGETHER)].float(), self.keys.float().mT
        keys = keys.flatten(0, 1)  # (B K) d S
        groups = q.reshape(len(keys), -1, *q.shape[2:]).unbind(1)  # of each group one head: (B K) R d
        scores: Tensor = torch.stack([_product(heads, keys) for heads in groups], dim=1) * q.shape[-1] ** -0.5
        scores = scores.view(*q.shape[:3], -1)[:, :, first - start : last - start]
        seen = self.seen(rows)
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)

    def error(self, pattern: Float[Tensor, "B H R S"], rows: slice) -> float:
        """How far pattern x values is from what the kernel gave: the largest ||a - b|| / ||b|| of a position."""
        B, H, R, S = pattern.shape
        K = self.values.shape[1]
        ours = (pattern.reshape(B, K, H // K * R, S) @ self.values.float()).view(B, H, R, -1)
        theirs = self.z[:, :, rows].float()
        distance, norm = (torch.linalg.vector_norm(x, dim=(1, 3)) for x in (ours - theirs, theirs))  # B R
        return float((distance / norm.clamp(min=torch.finfo(torch.float32).tiny)).max())


def _product(left: Float[Tensor, "n R d"], right: Float[Tensor, "n d S"]) -> Float[Tensor, "n R S"]:
    """left @ right by the library that the kernel uses too; torch multiplies small batches itself."""
    if left.shape[1] * left.shape[2] * right.shape[2] < _SMALL:
        return torch.stack([a @ b for a, b in zip(left, right, strict=True)])
    product: Tensor = torch.bmm(left, right)
    return product


def attention_pattern(scores: Float[Tensor, "B H R S"]) -> Float[Tensor, "B H R S"]:
    """What a row gives to each column: the softmax of its scores."""
    pattern: Tensor = scores.softmax(-1)
    return pattern


Shown = Tensor | Attended


@runtime_checkable
class Tap(Protocol):
    """Looks at a forward pass. It gets the run's own tensors and must not change them."""

    def wants(self, site: str, layer: int | None) -> bool:
        """Whether this value is looked at; asked before anything is done for it."""

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        """One value; for `scores` and `pattern` what they are recomputed from."""


def show(tap: Tap, layer: int | None, /, **values: Shown) -> None:
    """Hand the values that the tap wants to it, in the order given."""
    for site, value in values.items():
        if tap.wants(site, layer):
            tap.receive(site, layer, value)
