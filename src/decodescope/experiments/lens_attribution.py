"""Where the logits of a run come from: the parts that were kept, put to `analysis.attribution`."""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.analysis.attribution import head_logits, logit_directions, part_logits
from decodescope.analysis.lens import Unembedding
from decodescope.experiments.lens_records import Attribution, HeadShare, LayerShare, LensToken
from decodescope.model.decoder import Block, CausalLM
from decodescope.model.linear import Linear
from decodescope.observe.recording import Recording

STRONGEST = 8  # heads


def unembedding_of(model: CausalLM) -> Unembedding:
    """The last norm and the head of a model."""
    norm = model.model.norm
    return Unembedding(norm.weight, norm.eps, model.lm_head)


def kept_rows(recording: Recording, name: str) -> Float[Tensor, "... P X"]:
    """What was kept of one site, the positions of all steps in order."""
    return torch.cat(list(recording[name].values()), dim=-2)


def attribute(
    model: CausalLM, recording: Recording, tokens: Sequence[LensToken], logits: Float[Tensor, "P V"]
) -> list[Attribution]:
    """Where, at each position kept, the logit of its token comes from; `logits` are the run's own."""
    last = model.config.num_hidden_layers - 1
    unembedding, ids = unembedding_of(model), [token.token_id for token in tokens]
    stream = kept_rows(recording, f"layers.{last}.resid_post")  # P D
    directions = logit_directions(unembedding, ids, stream)  # P D
    embed = part_logits(directions, kept_rows(recording, "embed")).tolist()
    by_layer = [_layer_shares(cast(Block, block), recording, directions) for block in model.model.layers]
    by_position = [tuple(shares) for shares in zip(*by_layer, strict=True)]
    scales = unembedding.scale(stream.double()).tolist()
    own = [float(row[token_id]) for row, token_id in zip(logits, ids, strict=True)]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    return [
        _attribution(token, (run, scale, start), shares, group)
        for token, run, scale, start, shares in zip(tokens, own, scales, embed, by_position, strict=True)
    ]


def _layer_shares(block: Block, recording: Recording, directions: Float[Tensor, "P D"]) -> list[LayerShare]:
    """The shares of one layer, by position."""
    kept = {site: kept_rows(recording, f"layers.{block.layer}.{site}") for site in ("z", "attn_out", "mlp_out")}
    projection = block.self_attn.o_proj
    heads = head_logits(directions, kept["z"], projection[:]).tolist()
    biases = _bias_logits(directions, projection)
    attention, mlp = (part_logits(directions, kept[site]).tolist() for site in ("attn_out", "mlp_out"))
    rows = zip(attention, mlp, map(tuple, heads), biases, strict=True)
    return [LayerShare(block.layer, *row) for row in rows]


def _bias_logits(directions: Float[Tensor, "P D"], projection: Linear) -> Sequence[float | None]:
    if projection.bias is None:
        return [None] * len(directions)
    biases: list[float | None] = part_logits(directions, projection.bias[None]).tolist()
    return biases


def _attribution(
    token: LensToken, known: tuple[float, float, float], layers: tuple[LayerShare, ...], group: int
) -> Attribution:
    """One position summed up; `known` are the run's logit, the norm's scale and the embedding's share."""
    run, scale, embed = known
    total = embed + sum(layer.attention_logit + layer.mlp_logit for layer in layers)
    return Attribution(
        token_id=token.token_id,
        text=token.text,
        run_logit=run,
        total_logit=total,
        error_logit=total - run,
        heads_error_logit=max(map(_heads_error, layers), key=abs),
        norm_scale=scale,
        embed_logit=embed,
        layers=layers,
        strongest_heads=_strongest(layers, group),
    )


def _heads_error(layer: LayerShare) -> float:
    return sum(layer.head_logits) + (layer.bias_logit or 0.0) - layer.attention_logit


def _strongest(layers: tuple[LayerShare, ...], group: int) -> tuple[HeadShare, ...]:
    heads = [
        HeadShare(layer.layer, head, head // group, logit)
        for layer in layers
        for head, logit in enumerate(layer.head_logits)
    ]
    return tuple(sorted(heads, key=lambda share: abs(share.logit), reverse=True)[:STRONGEST])
