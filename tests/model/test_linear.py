"""One product for every way of holding a matrix, and models that hold theirs in blocks."""

import os
import subprocess
import sys

import pytest
import torch
from gguf_checkpoints import write_gguf
from torch import Tensor, nn

from decodescope.generate import Limits, generate
from decodescope.model import kernels
from decodescope.model.checkpoint import load_model
from decodescope.model.kernels import Packed, row_bytes
from decodescope.model.kernels.compiled import MOST_MATRICES
from decodescope.model.kernels.packed import FORMATS
from decodescope.model.kv_cache import KVCache
from decodescope.model.linear import Embedding, Linear, Matrix, by_kernels, together
from decodescope.model.memory import held_bytes
from decodescope.sampling.params import resolve
from decodescope.sampling.sampler import Sampler
from families import BY_NAME, VOCABULARY

LAYERS = 3
compiled = pytest.mark.skipif(
    kernels.available().instructions is None, reason="needs a C compiler; ends where there is one"
)


def random_packed(block_format: str, rows: int, columns: int) -> Packed:
    """Any bits, every float16 in a block small."""
    width = row_bytes(block_format, columns)
    assert width
    return Packed(block_format, torch.randint(0, 0x30, (rows, width), dtype=torch.uint8))


def linear_with(matrix: Tensor | Packed, bias: Tensor | None = None) -> Linear:
    rows, columns = matrix.shape
    linear = Linear(columns, rows, bias=bias is not None)
    linear.hold(matrix)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def random_ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def held(name: str) -> Tensor | Packed:
    return random_packed(name, 24, 512) if name in FORMATS else torch.randn(24, 512).to(getattr(torch, name))


# The product


@pytest.mark.parametrize("name", [*FORMATS, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 9), (2, 40)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_float32_activations_give_the_exact_product_of_whatever_is_held(name, shape, biased):
    x, bias = torch.randn(*shape, 512), torch.randn(24) if biased else None
    linear = linear_with(held(name), bias)
    with torch.inference_mode():
        found = linear(x)
    exact = x.double() @ linear[:].double().T + (bias.double() if biased else 0.0)
    assert found.dtype == torch.float32 and found.shape == (*shape, 24)
    scale = x.double().norm(dim=-1, keepdim=True) * linear[:].double().norm(dim=1)
    assert ((found - exact).abs() <= 1e-6 * scale + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_in_bfloat16_the_sum_is_rounded_once(rows):
    x, linear = torch.randn(rows, 512).bfloat16(), linear_with(held("bfloat16"))
    with torch.inference_mode():
        found = linear(x)
    exact = x.double() @ linear[:].double().T
    assert found.dtype == torch.bfloat16
    scale = x.double().norm(dim=-1, keepdim=True) * linear[:].double().norm(dim=1)
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6 * scale).all()


@pytest.mark.parametrize("name", [*FORMATS, "bfloat16"])
def test_an_embedding_is_the_row_of_the_id(name):
    embedding = Embedding(24, 512)
    embedding.hold(held(name))
    ids = torch.tensor([[3, 0, 23], [3, 3, 7]])
    assert torch.equal(embedding(ids), embedding[:][ids])


def test_what_is_held_can_be_exchanged_for_anything_else():
    linear = Linear(512, 24, bias=False)
    for name in ("Q4_K", "float16", "Q8_0", "float32"):
        linear.hold(held(name))
        assert linear.stored_as == name and linear.shape == (24, 512) and linear[2:5].shape == (3, 512)


MIXED = [
    ("Q5_0", "Q5_0", "Q8_0"),
    ("Q4_K", "NF4", "bfloat16"),
    ("float16", "Q6_K"),
    ("float32", "Q4_0"),
    ("Q8_0",),
]


@pytest.mark.parametrize("names", MIXED, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_together_give_what_each_gives_alone_bit_by_bit(names, rows, dtype):
    biases = [torch.randn(24).to(dtype), None, torch.randn(24).to(dtype)]
    linears = [linear_with(held(name), bias) for name, bias in zip(names, biases, strict=False)]
    x = torch.randn(rows, 1, 512).to(dtype)
    with torch.inference_mode():
        found, alone = together(x, *linears), [linear(x) for linear in linears]
    for one, other, linear in zip(found, alone, linears, strict=True):
        assert one.dtype == dtype and one.shape == (rows, 1, 24)
        assert torch.equal(one, other)
        bias = 0.0 if linear.bias is None else linear.bias.double()
        exact, widths = x.double() @ linear[:].double().T + bias, x.double().norm() * linear[:].double().norm()
        assert ((one - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * widths).all()


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_so_do_long_ones_of_odd_sizes_in_any_number_of_pieces(dtype, all_threads):
    linears, x = [linear_with(torch.randn(rows, 512).to(dtype)) for rows in (1001, 2003)], torch.randn(1, 512)
    with torch.inference_mode():
        alone = [linear(x) for linear in linears]
        for _ in range(20):
            assert all(map(torch.equal, together(x, *linears), alone))


@compiled
def test_more_matrices_than_a_call_takes_are_multiplied_one_by_one():
    linears, x = [linear_with(held("Q8_0")) for _ in range(MOST_MATRICES + 1)], torch.randn(1, 512)
    with torch.inference_mode():
        assert all(map(torch.equal, together(x, *linears), [linear(x) for linear in linears]))


@compiled
def test_an_input_of_another_width_is_refused():
    linears, x = [linear_with(held(name)) for name in ("Q8_0", "bfloat16")], torch.randn(1, 480)
    with pytest.raises(ValueError, match="480 activations against rows of 512"):
        together(x, *linears)
    for linear in linears:
        with pytest.raises(ValueError, match="480 activations against rows of 512"):
            linear(x)


# Models


@compiled
def test_only_a_model_whose_every_matrix_our_kernels_read_needs_none_of_torchs_products(tiny_folders):
    for dtype, expected in (("float32", False), ("bfloat16", True), ("float16", True)):
        model = load_model(tiny_folders["qwen2-gqa"], dtype)[0]
        assert by_kernels(model) == expected
    model.model.layers[1].mlp.up_proj.hold(torch.randn(model.model.layers[1].mlp.up_proj.shape))
    assert not by_kernels(model)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, KVCache(LAYERS), every_logit=True)


def packed_and_dense(tmp_path, name: str, kind: str) -> tuple[nn.Module, nn.Module]:
    path = write_gguf(tmp_path / "m.gguf", BY_NAME[name].reference(), BY_NAME[name].architecture, kind=kind)
    return load_model(path)[0], load_model(path, "float32")[0]


@compiled
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
@pytest.mark.parametrize("name", ["qwen2-gqa", "qwen2-mha-tied", "llama-gqa", "llama-mqa-tied", "qwen3-gqa"])
def test_a_packed_model_is_the_dense_one_within_float32_rounding(tmp_path, name, kind):
    packed, dense = packed_and_dense(tmp_path, name, kind)
    formats = {each.stored_as for each in packed.modules() if isinstance(each, Matrix)}
    assert formats == (
        {"bfloat16"} if kind == "BF16" else {kind, "float32"}
    )  # down_proj's rows are no whole blocks
    for ids in (random_ids(1, 30), random_ids(3, 4), random_ids(1, 1)):
        torch.testing.assert_close(logits(packed, ids), logits(dense, ids), atol=2e-5, rtol=0)


@compiled
def test_a_tied_head_in_blocks_is_in_memory_once(tmp_path):
    packed, dense = packed_and_dense(tmp_path, "qwen2-mha-tied", "Q8_0")
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert held_bytes(packed) < held_bytes(dense) / 2


@compiled
def test_the_real_model_chooses_the_same_tokens_packed_and_dense(starter_path, all_threads):
    packed, dense = (load_model(starter_path, dtype)[0] for dtype in (None, "float32"))
    assert held_bytes(packed) < 0.25 * held_bytes(dense)
    prompts = [[151644, 872, 198, *range(5000, 5000 + length)] for length in (3, 20)]
    chosen = [
        [
            [d.choice.token_id for d in step]
            for step in generate(model, prompts, [Sampler(resolve({}))] * 2, Limits(16))
        ]
        for model in (packed, dense)
    ]
    assert chosen[0] == chosen[1]
    ids = torch.tensor([prompts[1]])
    here, there = (model(ids, every_logit=True).double().log_softmax(-1) for model in (packed, dense))
    kl_nats = (there.exp() * (there - here)).sum(-1)
    assert kl_nats.max() < 1e-8


def test_activations_beyond_float16_do_not_overflow_in_float16(tiny_folders):
    """The residual stream of large models exceeds 65504 in a few columns."""
    models = [load_model(tiny_folders["qwen2-gqa"], dtype)[0] for dtype in ("float16", "float32")]
    for model in models:
        model.model.layers[0].mlp.down_proj.weight.mul_(0).add_(30_000)
        model.model.layers[1].mlp.up_proj.weight.mul_(300)
    with torch.no_grad():  # the same numbers in both: how they are rounded is not what this is about
        for half, whole in zip(*(model.parameters() for model in models), strict=True):
            whole.copy_(half)
    ids, seen = random_ids(1, 20), []
    hook = models[0].model.layers[1].register_forward_hook(lambda _, __, out: seen.append(float(out.abs().max())))
    found, expected = (logits(model, ids) for model in models)
    hook.remove()
    assert seen[0] > 65504 * 2, "the model must have such activations for this to show anything"
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_without_a_compiler_a_gguf_model_is_dense_and_the_same(tmp_path, tiny_folders):
    path = write_gguf(tmp_path / "m.gguf", BY_NAME["qwen2-gqa"].reference(), "Qwen2", kind="Q8_0")
    script = f"""
import torch
from pathlib import Path
from decodescope.model.checkpoint import load_model
model = load_model(Path({str(path)!r}))[0]
torch.save(model(torch.arange(9)[None]), {str(tmp_path / "logits.pt")!r})
print(model.lm_head.stored_as)
"""
    environment = os.environ | {"PATH": "", "DECODESCOPE_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout.strip() == "float32"
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    torch.testing.assert_close(found, load_model(path)[0](torch.arange(9)[None]), atol=2e-5, rtol=0)
