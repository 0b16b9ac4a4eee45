"""Direct logit attribution: worked by hand, and summing up to the run's logits in every family."""

import math

import pytest
import torch
from watched import of_layers, unembedding, watched_pass

from decodescope.analysis.attribution import head_logits, logit_directions, part_logits
from decodescope.analysis.lens import Unembedding

TWO_TOKENS = Unembedding(torch.tensor([1.0, 2.0]), 0.5, torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
STREAM = torch.tensor([[3.0, 4.0]])
SCALE = 1 / math.sqrt((9 + 16) / 2 + 0.5)


def test_a_share_is_the_part_times_weight_norm_and_frozen_scale():
    directions = logit_directions(TWO_TOKENS, [1], STREAM)
    torch.testing.assert_close(directions, torch.tensor([[3 * SCALE, 2 * SCALE]], dtype=torch.float64))
    embed, attention = torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, -1.0]])  # together the stream
    shares = [part_logits(directions, part).item() for part in (embed, attention)]
    assert shares == pytest.approx([13 * SCALE, 4 * SCALE])
    assert sum(shares) == pytest.approx(TWO_TOKENS.logits(STREAM)[0, 1].item())


def test_each_head_goes_through_its_own_columns_of_the_output_projection():
    directions = torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    o_weight = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 3.0]])  # D=2, two heads of two
    z = torch.tensor([[[5.0, 7.0]], [[0.5, 0.25]]])  # H P d
    assert head_logits(directions, z, o_weight).tolist() == [[5.0 + 70.0, 1.0 + 7.5]]


def test_positions_have_their_own_token_and_their_own_scale():
    streams = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    directions = logit_directions(TWO_TOKENS, [0, 1], streams)
    logits = TWO_TOKENS.logits(streams)
    sums = part_logits(directions, streams)
    torch.testing.assert_close(sums.float(), torch.stack([logits[0, 0], logits[1, 1]]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_parts_sum_to_the_logit_and_heads_to_their_block(family, tiny_folders, dtype, tolerance):
    model, recording, logits = watched_pass(tiny_folders[family.name], dtype)
    ids = logits.argmax(-1).tolist()
    last = model.config.num_hidden_layers - 1
    directions = logit_directions(unembedding(model), ids, recording[f"layers.{last}.resid_post"][0])
    assert directions.dtype == torch.float64
    attention = [part_logits(directions, out) for out in of_layers(model, recording, "attn_out")]
    mlp = [part_logits(directions, out) for out in of_layers(model, recording, "mlp_out")]
    total = part_logits(directions, recording["embed"][0]) + sum(attention) + sum(mlp)
    own = logits[range(len(ids)), ids].double()
    assert float((total - own).abs().max()) < tolerance * float(logits.abs().max())
    for layer, z, block in zip(model.model.layers, of_layers(model, recording, "z"), attention, strict=True):
        projection = layer.self_attn.o_proj
        heads = head_logits(directions, z, projection.weight)
        assert heads.shape == (len(ids), model.config.num_attention_heads)
        bias = 0 if projection.bias is None else part_logits(directions, projection.bias[None])
        assert float((heads.sum(-1) + bias - block).abs().max()) < tolerance * float(logits.abs().max())
