"""Checkpoints in fewer bits: which format each matrix gets, what stays dense, what is refused, and what comes out."""

import importlib.util

import pytest
import torch
from gguf_checkpoints import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodescope.errors import InputError
from decodescope.locale import set_language
from decodescope.model import kernels
from decodescope.model.bitsandbytes import Quantized, quantized
from decodescope.model.checkpoint import fill, load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import Packed, unpack_rows
from decodescope.model.kernels.packing import pack_into
from decodescope.model.linear import Linear, Matrix
from decodescope.model.memory import held_bytes
from decodescope.model.precision import Precision, choose_precision
from decodescope.model.quantize import block_format, pack
from decodescope.model.weights import open_weights
from families import BY_NAME
from tiny_model import make_tiny_model

KINDS = ("int8", "int4", "nf4")
INNER, HEAD, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
WIDE = dict(
    hidden_size=256, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes (extra quant, 43 MB); ends where it is installed",
)
no_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="says what is missing; runs without bitsandbytes"
)


def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def dense(found: Tensor | Packed) -> Tensor:
    return unpack_rows(found, 0, found.shape[0], torch.float32) if isinstance(found, Packed) else found.float()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows of 256 are whole blocks everywhere, rows of 320 everywhere but in Q4_K."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), **WIDE)


def matrices(model: CausalLM) -> dict[str, Matrix]:
    return {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Matrix)}


# One matrix


@pytest.mark.parametrize(
    ("kind", "name", "columns", "expected"),
    [("int8", INNER, 512, "Q8_0"), ("int8", INNER, 96, "Q8_0"), ("int8", INNER, 48, None), ("int4", INNER, 512, "Q4_K"),
     ("int4", INNER, 896, "Q4_0"), ("int4", INNER, 48, None), ("int4", HEAD, 512, "Q8_0"), ("int4", EMBEDDING, 896, "Q8_0"),
     ("nf4", INNER, 896, "NF4"), ("nf4", INNER, 96, None), ("nf4", HEAD, 896, "Q8_0")],
)  # fmt: skip
def test_each_matrix_gets_the_first_format_whose_blocks_fill_its_rows(kind, name, columns, expected):
    assert block_format(kind, name, columns) == expected
    found = pack(torch.randn(3, columns), kind, name, take)
    assert found.shape == (3, columns)
    assert (found.format if isinstance(found, Packed) else None) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 31, 48, 100])
def test_rows_of_no_whole_block_stay_dense_in_16_bits(dtype, columns):
    rows = torch.randn(5, columns).to(dtype)
    found = pack(rows, "int4", INNER, take)
    assert isinstance(found, Tensor) and found.element_size() == 2
    assert torch.equal(found, rows if dtype.itemsize == 2 else rows.half())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [7e4, -1e30, float("nan"), float("inf")])
def test_a_matrix_that_no_scale_can_hold_stays_as_it_is(kind, value):
    rows = torch.randn(4, 256)
    rows[2, 77] = value
    found = pack(rows, kind, INNER, take)
    assert isinstance(found, Tensor) and torch.equal(found.nan_to_num(1.5), rows.nan_to_num(1.5))


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_fewer_bits_already_stays_as_it_is(kind):
    few = pack(torch.randn(4, 256), "nf4", INNER, take)
    assert isinstance(few, Packed)
    found = pack(few, kind, INNER, take)
    assert isinstance(found, Packed) and found.equals(few)
    assert found.blocks.data_ptr() != few.blocks.data_ptr()  # it lies where it was asked to lie


def test_blocks_of_more_bits_are_packed_anew_tile_by_tile(monkeypatch):
    rows = torch.randn(37, 512)
    eight = pack(rows, "int8", INNER, take)
    assert isinstance(eight, Packed)
    whole = pack(dense(eight), "int4", INNER, take)
    for tile in (1, 512 * 3, 512 * 37):
        monkeypatch.setattr("decodescope.model.quantize._TILE_VALUES", tile)
        found = pack(eight, "int4", INNER, take)
        assert isinstance(found, Packed) and isinstance(whole, Packed) and found.equals(whole)


def test_broken_blocks_are_handed_on_for_the_loader_to_name():
    eight = Packed("Q8_0", torch.full((2, 272), 0x7C, dtype=torch.uint8))
    found = pack(eight, "int4", INNER, take)
    assert isinstance(found, Packed) and found.nonfinite()


# Whole models


def logits(model: CausalLM) -> Tensor:
    return model(torch.arange(1, 40)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_is_the_model_of_its_unpacked_weights(wide, kind):
    model, _ = load_model(wide, quantize=kind)
    full, _ = load_model(wide, dtype="float32")
    for name, matrix in matrices(model).items():
        full.get_submodule(name.removesuffix(".weight")).hold(matrix[0 : matrix.shape[0]].float())
    assert torch.allclose(logits(model), logits(full), atol=2e-4)


def test_fewer_bits_give_less_and_less_the_same_logits(wide):
    """Random weights make more of every error than trained ones."""
    exact = logits(load_model(wide, dtype="float32")[0])
    errors = [float((logits(load_model(wide, quantize=kind)[0]) - exact).norm() / exact.norm()) for kind in KINDS]
    assert errors == sorted(errors)
    assert errors[0] < 0.06 and errors[2] < 0.8


@pytest.mark.parametrize(
    ("kind", "inner", "down"), [("int8", "Q8_0", "Q8_0"), ("int4", "Q4_K", "Q4_0"), ("nf4", "NF4", "NF4")]
)
def test_every_matrix_is_held_as_its_shape_allows_and_vectors_are_not(wide, kind, inner, down):
    model, _ = load_model(wide, quantize=kind)
    held = {name: each.stored_as for name, each in matrices(model).items()}
    assert held.pop(HEAD) == held.pop(EMBEDDING) == "Q8_0"
    assert {form for name, form in held.items() if "down_proj" in name} == {down}
    assert {form for name, form in held.items() if "down_proj" not in name} == {inner}
    assert all(parameter.dtype == torch.float32 and parameter.ndim == 1 for parameter in model.parameters())


def test_a_model_takes_the_fewer_bytes(wide):
    sizes = [
        held_bytes(load_model(wide, **how)[0])
        for how in (dict(dtype="bfloat16"), dict(quantize="int8"), dict(quantize="int4"), dict(quantize="nf4"))
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.4 * sizes[0]


def test_rows_that_fill_no_block_are_left_dense_and_the_model_runs(tmp_path):
    model, _ = load_model(make_tiny_model(tmp_path, hidden_size=40, intermediate_size=64), quantize="int8")
    held = {name: each.stored_as for name, each in matrices(model).items()}
    assert {form for name, form in held.items() if "down_proj" in name} == {"Q8_0"}
    assert {form for name, form in held.items() if "down_proj" not in name} == {"float16"}
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(wide, tmp_path, kind, value):
    tensors = load_file(wide / "model.safetensors")
    tensors[INNER][3, 5] = value
    (tmp_path / "config.json").write_bytes((wide / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as caught:
        load_model(tmp_path, quantize=kind)
    assert caught.value.key == "checkpoint.nonfinite" and caught.value.values["name"] == INNER


@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0", "Q5_0"])
def test_a_gguf_file_can_be_put_into_fewer_bits_too(tmp_path, stored):
    path = write_gguf(tmp_path / "m.gguf", BY_NAME["llama-gqa"].reference(), "Llama", kind=stored)
    small, stored_model = load_model(path, quantize="int4")[0], load_model(path, dtype="float32")[0]
    assert held_bytes(small) < held_bytes(stored_model)
    exact = logits(stored_model)
    assert (logits(small) - exact).norm() < 0.4 * exact.norm()


def test_a_tied_head_is_one_matrix_in_fewer_bits_too(tmp_path):
    folder = make_tiny_model(tmp_path, **{**WIDE, "tie_word_embeddings": True})
    model, _ = load_model(folder, quantize="int4")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.stored_as == "Q8_0"


def test_without_a_compiler_the_same_model_is_loaded(wide, monkeypatch):
    with_c, _ = load_model(wide, quantize="int4")
    monkeypatch.setattr(kernels.packing, "library", lambda: None)
    without, _ = load_model(wide, quantize="int4")
    for one, other in zip(matrices(with_c).values(), matrices(without).values(), strict=True):
        assert (
            isinstance(one.weight, Packed) and isinstance(other.weight, Packed) and one.weight.equals(other.weight)
        )


# On an accelerator

ELSEWHERE = torch.device("cuda")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_int4_on_an_accelerator_is_refused_with_what_works_there(wide, language):
    set_language(language)
    with pytest.raises(InputError) as caught:
        choose_precision(open_weights(wide), None, "int4", ELSEWHERE)
    assert caught.value.key == "quantize.device"
    assert all(word in str(caught.value) for word in ("int8, nf4", "cuda", "--device cpu"))


@no_bitsandbytes
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_without_bitsandbytes_the_sentence_says_how_to_install_it(wide, kind, language):
    set_language(language)
    with pytest.raises(InputError) as caught:
        choose_precision(open_weights(wide), None, kind, ELSEWHERE)
    assert caught.value.key == "quantize.needs_bitsandbytes"
    assert 'pip install "decodescope[quant]"' in str(caught.value) and "\n" not in str(caught.value)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_on_an_accelerator_matrices_are_read_in_16_bits_for_bitsandbytes(wide, kind):
    found = choose_precision(open_weights(wide), None, kind, ELSEWHERE)
    assert found == Precision(torch.float32, torch.float16, kind, by_bitsandbytes=True)


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "error"), [("nf4", 1e-5), ("int8", 0.02)])
def test_a_matrix_held_by_bitsandbytes_multiplies_as_its_rows_do(kind, error):
    """LLM.int8() puts activations into 8 bits as well, but for the large ones."""
    weight, x, bias = torch.randn(24, 128) * 0.1, torch.randn(2, 3, 128), torch.randn(24)
    x[:, :, 5] *= 30
    held = quantized(weight, kind)
    assert isinstance(held, Quantized) and held.shape == (24, 128) and held.nbytes < 24 * 128 * 1.1
    linear = Linear(128, 24, bias=True)
    linear.hold(held)
    linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    assert linear.stored_as == kind
    assert torch.equal(linear[5:9], linear[0:24][5:9]) and linear[0:24].dtype == torch.float32
    expected = x @ linear[0:24].T + bias
    for dtype in (torch.float32, torch.bfloat16):
        found = linear(x.to(dtype))
        assert found.dtype == dtype
        assert (found.float() - expected).norm() < max(error, torch.finfo(dtype).eps) * expected.norm()


@needs_bitsandbytes
def test_nf4_of_bitsandbytes_and_ours_are_the_same_weights():
    weight = torch.randn(16, 256).bfloat16()
    theirs, ours = quantized(weight, "nf4"), Packed("NF4", torch.empty(16, 136, dtype=torch.uint8))
    assert isinstance(theirs, Quantized) and pack_into(ours, weight)
    assert torch.equal(theirs.rows(0, 16), dense(ours))


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.2), ("nf4", 0.8)])
def test_a_model_held_by_bitsandbytes_runs_and_its_ends_stay_dense(wide, kind, error):
    """On the processor, where bitsandbytes works too."""
    weights = open_weights(wide)
    model = fill(weights, Precision(torch.float32, torch.bfloat16, kind, by_bitsandbytes=True))
    held = {name: each.stored_as for name, each in matrices(model).items()}
    assert held.pop(HEAD) == held.pop(EMBEDDING) == "bfloat16"
    assert set(held.values()) == {kind}
    exact = logits(load_model(wide, dtype="float32")[0])
    assert (logits(model) - exact).norm() < error * exact.norm()
