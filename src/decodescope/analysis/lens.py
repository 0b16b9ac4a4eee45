"""The logit lens: what each layer would have said, were it the last one.

The last norm and the head are applied to the residual stream behind every layer (as defined in
https://arxiv.org/abs/2303.08112 before it is refined there). L layers, D hidden, V vocabulary rows, P positions.
Entropies and divergences are in nats: float32 logits, float64 log-softmax.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

LOGITS_AT_ONCE = 2**26  # elements: 256 MiB
_WEIGHTS_AT_ONCE = 2**24  # elements of a 16-bit head made float32 together: 64 MiB


@runtime_checkable
class Rows(Protocol):
    """A matrix [V, D] that gives its rows dense, `head[start:stop]`: a tensor, or one held in fewer bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """V and D."""

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Some neighbouring rows."""


@dataclass(frozen=True, slots=True)
class Unembedding:
    """What makes logits of a residual stream: the last norm's weight [D] and eps, and the head [V, D]."""

    norm_weight: Float[Tensor, " D"]
    eps: float
    head: Rows

    def logits(self, resid: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Logits in float32, on the CPU, whatever the dtype and device of stream and weights."""
        resid = resid.to(self.head.device, torch.float32)
        normed = self.norm_weight.float() * (resid * self.scale(resid)[:, None])  # in the run's order
        rows = max(_WEIGHTS_AT_ONCE // self.head.shape[1], 1)
        starts = range(0, self.head.shape[0], rows)
        return torch.cat([F.linear(normed, self.head[at : at + rows].float()).cpu() for at in starts], dim=-1)

    def scale(self, resid: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """What the norm multiplies a stream with: 1 / sqrt(mean(x^2) + eps), in the dtype of `resid`."""
        return torch.rsqrt(resid.pow(2).mean(-1) + self.eps)


@dataclass(frozen=True, slots=True)
class TokenPath:
    """One token on its way through the layers; `ranks` count from 1, of equals the lower id comes first."""

    ranks: tuple[int, ...]
    logprobs_nats: tuple[float, ...]
    probs: tuple[float, ...]

    @property
    def first_layer(self) -> int | None:
        """The first layer that has the token at the top; None where none has."""
        return self.ranks.index(1) if 1 in self.ranks else None

    @property
    def stays_from_layer(self) -> int | None:
        """The first layer from which on the token is at the top; None where it is not in the end."""
        below = [layer for layer, rank in enumerate(self.ranks, start=1) if rank > 1]
        first = below[-1] if below else 0
        return first if first < len(self.ranks) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """What every layer would have said at one position."""

    logits: Float[Tensor, "L V"]
    logprobs: Float[Tensor, "L V"]  # float64

    @classmethod
    def of(cls, logits: Float[Tensor, "L V"]) -> "Reading":
        return cls(logits, logits.double().log_softmax(-1))

    def top(self, count: int) -> list[list[tuple[int, float]]]:
        """The `count` most probable (token id, probability) of every layer; of equals the lower id first."""
        ids = [_highest(row, count) for row in self.logits]
        probs = [row[top].exp() for row, top in zip(self.logprobs, ids, strict=True)]
        pairs = zip(ids, probs, strict=True)
        return [list(zip(top.tolist(), share.tolist(), strict=True)) for top, share in pairs]

    def entropy_nats(self) -> list[float]:
        """-sum p ln p of every layer."""
        return _floats(-(self.logprobs.exp() * self.logprobs).sum(-1))

    def kl_nats(self, final: Float[Tensor, " V"]) -> list[float]:
        """KL(final || layer) of every layer: sum p ln(p / q), p of the logits `final`, q the layer's."""
        said = final.to("cpu", torch.float64).log_softmax(-1)
        return _floats((said.exp() * (said - self.logprobs)).sum(-1).clamp(min=0))

    def path(self, token_id: int) -> TokenPath:
        """Rank and probability of one token in every layer."""
        logit = self.logits[:, token_id, None]
        before = (self.logits > logit).sum(-1) + (self.logits[:, :token_id] == logit).sum(-1)
        logprobs = self.logprobs[:, token_id]
        return TokenPath(tuple((before + 1).tolist()), tuple(_floats(logprobs)), tuple(_floats(logprobs.exp())))


def read_positions(resid: Float[Tensor, "P L D"], unembedding: Unembedding) -> Iterator[Reading]:
    """Read the layers' streams, position by position; as many go through the head together as memory allows."""
    layers, vocabulary = resid.shape[1], unembedding.head.shape[0]
    together = max(LOGITS_AT_ONCE // (layers * vocabulary), 1)
    for some in torch.split(resid, together):
        logits = unembedding.logits(some.flatten(0, 1)).view(-1, layers, vocabulary)
        yield from map(Reading.of, logits)


def largest_difference(one: Float[Tensor, " V"], other: Float[Tensor, " V"]) -> float:
    """The largest |a - b| of two rows of logits."""
    return float((one.cpu().double() - other.cpu().double()).abs().max())


def first_nonfinite(logits: Float[Tensor, "L V"]) -> int | None:
    """The first layer with a logit that is NaN or infinite."""
    faulty = (~logits.isfinite()).any(-1).nonzero().flatten().tolist()
    return faulty[0] if faulty else None


def _highest(logits: Float[Tensor, " V"], count: int) -> Int[Tensor, " k"]:
    """The ids of the highest logits, highest first."""
    count = min(count, len(logits))
    among = (logits >= logits.topk(count).values[-1]).nonzero().flatten()  # more, where the last has equals
    return among[logits[among].argsort(descending=True, stable=True)[:count]]


def _floats(values: Float[Tensor, " L"]) -> list[float]:
    return list(map(float, values.tolist()))
