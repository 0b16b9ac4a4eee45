"""From weights on disk to a model: every value as stored, every tensor accounted for, every fault one sentence."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_checkpoints import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodescope.errors import InputError
from decodescope.model.checkpoint import load_model
from decodescope.model.linear import Matrix
from decodescope.model.precision import DTYPES
from decodescope.model.weights import open_weights
from families import BY_NAME, VOCABULARY, Family

Tensors = dict[str, Tensor]
IDS = torch.arange(0, 60, 2)[None]
FILE = "model.safetensors"


def fault(path: Path, dtype: str | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        load_model(path, dtype)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 700
    return caught.value


@pytest.fixture
def altered(tmp_path: Path, tiny_folders: dict[str, Path]):
    """A copy of a tiny folder whose tensors a function has changed."""

    def alter(change: Callable[[Tensors], object], name: str = "qwen2-gqa") -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(tiny_folders[name], folder, dirs_exist_ok=True)
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE)
        return folder

    return alter


def parameters(model: torch.nn.Module) -> Tensors:
    return dict(model.named_parameters())


# Values


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_values_are_the_files_as_stored_and_cast(altered, stored):
    folder = altered(lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    on_disk = load_file(folder / FILE)
    for dtype in (None, *DTYPES):
        model, weights = load_model(folder, dtype)
        assert weights.stored_dtype == stored
        target = DTYPES[dtype] if dtype else stored
        activations = torch.float32 if target == torch.float16 else target
        found = parameters(model)
        assert found.keys() == on_disk.keys()
        for name, tensor in found.items():
            held = target if tensor.ndim == 2 else activations
            assert tensor.dtype == held and torch.equal(tensor, on_disk[name].to(held)), name
        assert model.dtype == activations
        assert torch.isfinite(model(IDS)).all()


def test_a_sharded_checkpoint_is_the_whole_one(tmp_path):
    reference = BY_NAME["qwen3-gqa"].reference()
    reference.save_pretrained(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (load_model(tmp_path / name)[0] for name in ("whole", "shards"))
    assert parameters(whole).keys() == parameters(shards).keys()
    assert all(torch.equal(parameters(shards)[name], tensor) for name, tensor in parameters(whole).items())


def test_shards_without_an_index_are_all_read(tmp_path):
    BY_NAME["qwen2-gqa"].reference().save_pretrained(tmp_path, max_shard_size="20KB")
    expected, _ = load_model(tmp_path)
    (tmp_path / f"{FILE}.index.json").unlink()
    assert torch.equal(load_model(tmp_path)[0](IDS), expected(IDS))


def test_formats_and_bytes_are_those_on_disk(tiny_folders):
    weights = open_weights(tiny_folders["qwen2-gqa"])
    assert set(weights.formats.values()) == {"F32"}
    total = sum(t.numel() for t in load_file(tiny_folders["qwen2-gqa"] / FILE).values())
    assert weights.stored_bytes() == {"F32": 4 * total}


def test_progress_counts_up_to_all_values(tiny_folders):
    told: list[tuple[int, int]] = []
    model, _ = load_model(tiny_folders["llama-gqa"], progress=lambda done, total: told.append((done, total)))
    done = [at for at, _ in told]
    assert done == sorted(done)
    assert told[-1] == (sum(p.numel() for p in model.parameters()),) * 2


def test_building_the_empty_model_draws_no_values_and_imports_nothing_heavy(tiny_folders):
    """Initial values on the meta device pull in sympy: a second, and 75 MB, before the first step."""
    script = """
import sys
from pathlib import Path
from decodescope.model.checkpoint import load_model
load_model(Path(sys.argv[1]))
sys.exit(int("sympy" in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script, tiny_folders["qwen3-gqa"]], check=False).returncode == 0


def test_nothing_is_left_without_values_or_ready_to_be_trained(family: Family, tiny_folders):
    model, _ = load_model(tiny_folders[family.name])
    assert not model.training
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device.type == "cpu" and not tensor.requires_grad


# Every tensor accounted for


def test_missing_tensors_are_named(altered):
    error = fault(altered(lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias")))
    assert error.key == "checkpoint.missing"
    assert "model.layers.1.self_attn.k_proj.bias" in str(error) and error.values["count"] == 1


def test_many_missing_tensors_are_counted_and_a_few_named(altered):
    error = fault(altered(lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name]))
    assert error.values["count"] == 9 and str(error).count("mlp") == 4


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.sinks", "model.layers.3.mlp.up_proj.weight", "lora.a"])
def test_unexpected_tensors_are_named(altered, name):
    error = fault(altered(lambda tensors: tensors.update({name: torch.ones(2)})))
    assert error.key == "checkpoint.unexpected" and name in str(error)


def test_a_misshapen_tensor_is_named_with_both_shapes(altered):
    error = fault(altered(lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)})))
    assert error.key == "checkpoint.shapes" and "model.norm.weight [33], not [32]" in str(error)


def test_a_transposed_matrix_is_misshapen(altered):
    name = "model.layers.0.mlp.up_proj.weight"
    assert fault(altered(lambda t: t.update({name: t[name].T.contiguous()}))).key == "checkpoint.shapes"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_that_are_no_numbers_are_named_and_counted(altered, bad, dtype):
    name = "model.layers.2.mlp.down_proj.weight"
    error = fault(altered(lambda tensors: tensors[name].view(-1)[5:8].fill_(bad)), dtype)
    assert error.key == "checkpoint.nonfinite" and name in str(error)
    assert (error.values["count"], error.values["total"]) == (3, 32 * 48)


def test_infinities_that_cancel_in_a_sum_are_found(altered):
    def plant(tensors: Tensors) -> None:
        tensors["model.norm.weight"][:2] = torch.tensor([float("inf"), -float("inf")])

    assert fault(altered(plant)).values["count"] == 2


def test_large_weights_whose_sum_overflows_are_fine(altered):
    folder = altered(lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(1e38))
    load_model(folder)


def test_a_dtype_too_narrow_for_the_weights_is_found(altered):
    folder = altered(lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(1e6))
    load_model(folder, "bfloat16")
    assert fault(folder, "float16").key == "checkpoint.nonfinite"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_not_floating_point_are_refused(altered, dtype):
    error = fault(altered(lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).to(dtype)})))
    assert error.key == "checkpoint.dtype" and "model.norm.weight" in str(error)


def test_a_tied_head_on_disk_that_equals_the_embedding_is_fine(altered, tiny_folders):
    name = "qwen2-mha-tied"
    expected, _ = load_model(tiny_folders[name])
    assert expected.lm_head.weight is expected.model.embed_tokens.weight
    same = altered(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), name)
    assert torch.equal(load_model(same)[0](IDS), expected(IDS))


def one_value_off(embedding: Tensor) -> Tensor:
    head = embedding.clone()
    head[50, 7] += 0.01
    return head


@pytest.mark.parametrize(
    "head", [one_value_off, lambda embedding: embedding[:3].clone()], ids=["other", "misshapen"]
)
def test_a_head_that_contradicts_the_tie_is_refused(altered, head):
    folder = altered(
        lambda t: t.update({"lm_head.weight": head(t["model.embed_tokens.weight"])}), "qwen2-mha-tied"
    )
    assert fault(folder).key == "checkpoint.untied_head"


def test_rotary_tables_that_old_checkpoints_carry_are_ignored(altered, tiny_folders):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = altered(lambda tensors: tensors.update({name: torch.zeros(4)}), "llama-gqa")
    assert torch.equal(load_model(folder)[0](IDS), load_model(tiny_folders["llama-gqa"])[0](IDS))


def test_a_tensor_in_two_shards_is_refused(altered):
    folder = altered(lambda tensors: None)
    (folder / FILE).rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, folder / "b.safetensors")
    assert fault(folder).key == "checkpoint.duplicate"


def test_a_whole_file_comes_before_what_else_lies_there_as_in_transformers(altered, tiny_folders):
    folder = altered(lambda tensors: None)
    save_file({"lora.a": torch.ones(2)}, folder / "adapter_model.safetensors")
    (folder / f"{FILE}.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    assert torch.equal(load_model(folder)[0](IDS), load_model(tiny_folders["qwen2-gqa"])[0](IDS))


@pytest.mark.parametrize("layers", [4096, 16_000_000])
def test_absurdly_many_layers_end_at_once(altered, layers):
    folder = altered(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, "layer_types": None}))
    assert fault(folder).key in ("checkpoint.missing", "config.size")


# Places and names


def test_what_is_no_checkpoint_is_refused(tmp_path):
    assert fault(tmp_path / "nowhere").key == "checkpoint.unknown_file"
    (tmp_path / "notes.txt").write_text("GG")
    assert fault(tmp_path / "notes.txt").key == "checkpoint.unknown_file"
    assert fault(tmp_path).key == "config.missing"
    shutil.copy(
        Path(__file__).parents[1] / "data/configs/qwen2.5-7b-instruct.config.json", tmp_path / "config.json"
    )
    assert fault(tmp_path).key == "checkpoint.no_weights"


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", ""])
def test_an_unknown_device_is_refused(tiny_folders, device):
    with pytest.raises(InputError) as caught:
        load_model(tiny_folders["qwen2-gqa"], device=device)
    assert caught.value.key == "device.unknown"


@pytest.mark.parametrize("dtype", ["int4", "float64", "FLOAT32", "torch.float32"])
def test_an_unknown_dtype_is_refused_and_the_known_ones_named(tiny_folders, dtype):
    error = fault(tiny_folders["qwen2-gqa"], dtype)
    assert error.key == "dtype.unknown" and "bfloat16" in str(error)


@pytest.mark.parametrize(
    ("index", "key"),
    [("{", "bad_index"), ("[]", "bad_index"), ("{}", "bad_index"), ('{"weight_map": 3}', "bad_index"),
     ('{"weight_map": {"a": ["x"]}}', "bad_index"), ('{"weight_map": {"a": 3}}', "bad_index"), ("[" * 99_999, "bad_index"),
     ('{"weight_map": {"a": "gone.safetensors"}}', "missing_shard"), ('{"weight_map": {"a": ""}}', "missing_shard"),
     ('{"weight_map": {"a": "../../etc/passwd"}}', "missing_shard"), ('{"weight_map": {"a": ".."}}', "missing_shard"),
     ('{"weight_map": {"a": "/dev/zero"}}', "missing_shard"), ('{"weight_map": {"a": "x\\u0000y"}}', "missing_shard"),
     ('{"weight_map": {"a": "\\ud800"}}', "missing_shard"), ('{"weight_map": {"a": "%s"}}' % ("x" * 5000), "missing_shard"),
     ('{"weight_map": {}}', "missing")],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_an_index_that_leads_nowhere_is_refused(altered, index, key):
    folder = altered(lambda tensors: None)
    (folder / FILE).rename(folder / "part.safetensors")
    (folder / f"{FILE}.index.json").write_text(index)
    assert fault(folder).key == f"checkpoint.{key}"


def test_a_shard_outside_the_folder_is_never_opened(tmp_path, altered):
    folder = altered(lambda tensors: None)
    (folder / FILE).rename(tmp_path / "outside.safetensors")
    (folder / f"{FILE}.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    assert fault(folder).key == "checkpoint.missing_shard"


# Damaged safetensors


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    Family("small", "Qwen2", dict(num_key_value_heads=2, num_hidden_layers=1)).save(folder)
    return folder


@pytest.fixture(scope="module")
def small_bytes(small_folder) -> bytes:
    return (small_folder / FILE).read_bytes()


@pytest.fixture(scope="module")
def rewrite(small_folder, tmp_path_factory) -> Callable[[bytes], Path]:
    folder = tmp_path_factory.mktemp("rewritten")
    shutil.copy(small_folder / "config.json", folder)

    def rewrite(data: bytes) -> Path:
        (folder / FILE).write_bytes(data)
        return folder

    return rewrite


def test_a_file_cut_off_anywhere_is_refused(small_bytes, rewrite):
    for length in (*range(12), 100, len(small_bytes) // 2, len(small_bytes) - 1):
        assert fault(rewrite(small_bytes[:length])).key == "checkpoint.safetensors"


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_wrong_header_length_is_refused(small_bytes, rewrite, length):
    assert fault(rewrite(struct.pack("<Q", length) + small_bytes[8:])).key == "checkpoint.safetensors"


def test_bytes_behind_the_last_tensor_are_refused(small_bytes, rewrite):
    assert fault(rewrite(small_bytes + b"\0")).key == "checkpoint.safetensors"


def loads_or_says_why(folder: Path) -> None:
    try:
        model, _ = load_model(folder)
    except InputError as error:
        assert len(str(error)) < 2000
    else:
        assert model(IDS[:, :3]).shape == (1, 1, VOCABULARY)


@settings(max_examples=120, derandomize=True, deadline=2000)
@given(st.data())
def test_mutated_bytes_load_or_are_refused(small_bytes, rewrite, data):
    damaged = bytearray(small_bytes)
    header = 8 + int.from_bytes(small_bytes[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header + 64))
        match data.draw(st.integers(0, 2)):
            case 0:
                damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=3))
            case 1:
                del damaged[at : at + data.draw(st.integers(1, 20))]
            case 2:
                del damaged[at:]
    loads_or_says_why(rewrite(bytes(damaged)))


JSON = st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.floats() | st.text(max_size=4)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I8", "F4", "F8_E4M3", "BOOL", "C64", "nonsense"]) | JSON,
        "shape": st.lists(st.sampled_from([0, 1, 32, 97, 1 << 40, 1 << 63, (1 << 64) - 1, -1]), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 30_000) | st.just(1 << 64), max_size=3) | JSON,
    },
)


@settings(max_examples=120, derandomize=True, deadline=2000)
@given(st.data())
def test_a_mutated_header_loads_or_is_refused(small_bytes, rewrite, data):
    end = 8 + int.from_bytes(small_bytes[:8], "little")
    header = json.loads(small_bytes[8:end])
    names = st.sampled_from(sorted(header))
    for name in data.draw(st.sets(names, min_size=1, max_size=2)):
        match data.draw(st.integers(0, 2)):
            case 0:
                header[name] = {**header[name], **data.draw(ENTRY)}
            case 1:
                header[data.draw(st.text(max_size=5))] = header.pop(name)
            case 2:
                header[name] = data.draw(JSON)
    text = json.dumps(header).encode()
    loads_or_says_why(rewrite(struct.pack("<Q", len(text)) + text + small_bytes[end:]))


# GGUF

AS_GGUF = ["llama-gqa", "llama-mqa-tied", "llama-biases", "llama-linear", "qwen2-gqa", "qwen2-mha-tied", "qwen2-yarn",
           "qwen3-gqa", "qwen3-tied-bias", "mistral-gqa", "mistral-window"]  # fmt: skip


@pytest.mark.parametrize("name", AS_GGUF)
def test_a_gguf_file_gives_the_logits_of_the_folder(tmp_path, tiny_folders, name):
    path = write_gguf(tmp_path / "m.gguf", BY_NAME[name].reference(), BY_NAME[name].architecture)
    found, weights = load_model(path)
    expected, _ = load_model(tiny_folders[name])
    assert set(weights.formats.values()) == {"F32"}
    assert torch.equal(found(IDS, every_logit=True), expected(IDS, every_logit=True))


def llama3_divisors() -> np.ndarray:
    """`rope_freqs.weight` for the tiny llama3 family: default frequencies over scaled ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](BY_NAME["llama-llama3"].config())
    return (1.0 / 10_000.0 ** (torch.arange(0, 8, 2) / 8) / scaled).numpy()


def test_llama3_frequencies_come_as_a_tensor(tmp_path, tiny_folders):
    reference = BY_NAME["llama-llama3"].reference()
    path = write_gguf(tmp_path / "m.gguf", reference, "Llama", extra={"rope_freqs.weight": llama3_divisors()})
    expected = load_model(tiny_folders["llama-llama3"])[0](IDS)
    torch.testing.assert_close(load_model(path)[0](IDS), expected, atol=1e-5, rtol=0)
    without = write_gguf(tmp_path / "n.gguf", reference, "Llama")
    assert (load_model(without)[0](IDS) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_tensors_are_what_the_gguf_package_unpacks(tmp_path, kind, dtype):
    from gguf import GGMLQuantizationType, quants

    reference = BY_NAME["qwen2-gqa"].reference()
    model, weights = load_model(write_gguf(tmp_path / "m.gguf", reference, "Qwen2", kind=kind), dtype)
    assert weights.formats["model.layers.0.mlp.gate_proj.weight"] == kind
    target = DTYPES[dtype or "float32"]
    packed = 0
    for name, original in reference.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        found = owner[:] if isinstance(owner, Matrix) and name.endswith("weight") else parameters(model)[name]
        assert found.dtype == target or (dtype is None and weights.formats[name] == kind)
        expected = original
        if weights.formats[name] == kind:
            packed += 1
            block = GGMLQuantizationType[kind]
            expected = torch.from_numpy(quants.dequantize(quants.quantize(original.numpy(), block), block))
        assert torch.equal(found, expected.to(found.dtype)), name
    assert packed > 15


def written(folder: Path, **options) -> Path:
    return write_gguf(folder / "m.gguf", BY_NAME["qwen2-gqa"].reference(), "Qwen2", **options)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"drop": ".bias"}, "checkpoint.missing"), ({"drop": "blk.0.attn_q.bias"}, "checkpoint.missing"),
     ({"drop": "blk.2"}, "checkpoint.missing"), ({"drop": "token_embd"}, "checkpoint.missing"),
     ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "checkpoint.unexpected"),
     ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "checkpoint.shapes"),
     ({"extra": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "checkpoint.shapes"),
     ({"metadata": {"logit_scale": 0.5}}, "config.unsupported"), ({"metadata": {"expert_count": 8}}, "config.unsupported"),
     ({"metadata": {"rope.scaling.type": "longrope"}}, "config.rope"),
     ({"metadata": {"rope.scaling.attn_factor": 1.2}}, "config.unsupported"),
     ({"metadata": {"rope.scaling.type": "linear"}}, "config.missing_key")],
    ids=str,
)  # fmt: skip
def test_a_gguf_file_that_does_not_fit_is_refused(tmp_path, options, key):
    assert fault(written(tmp_path, **options)).key == key


def replaced(path: Path, before: bytes, after: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 16_000_000), ("block_count", 0), ("block_count", 4), ("embedding_length", 64),
     ("attention.head_count", 3), ("attention.head_count", 0), ("attention.key_length", 6), ("context_length", 0),
     ("feed_forward_length", (1 << 32) - 1), ("attention.head_count_kv", 8), ("rope.dimension_count", 4)],
)  # fmt: skip
def test_gguf_numbers_that_contradict_its_tensors_are_refused(tmp_path, key, value):
    path = written(tmp_path)
    name = f"qwen2.{key}".encode() + struct.pack("<I", 4)
    at = path.read_bytes().index(name)
    data = bytearray(path.read_bytes())
    data[at + len(name) : at + len(name) + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    assert fault(path).key in ("config.size", "config.groups", "config.unsupported", "checkpoint.missing",
                               "checkpoint.shapes")  # fmt: skip


def test_an_unknown_gguf_architecture_is_refused(tmp_path):
    path = replaced(written(tmp_path), b"general.architecture" + struct.pack("<IQ", 8, 5) + b"qwen2",
                    b"general.architecture" + struct.pack("<IQ", 8, 5) + b"mamba")  # fmt: skip
    assert fault(path).key == "config.architecture"


def test_a_gguf_file_with_weights_that_are_no_numbers_is_refused(tmp_path):
    path = written(tmp_path)
    info = open_weights(path).header.tensors["output_norm.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + 8)
        file.write(struct.pack("<f", float("nan")))
    error = fault(path)
    assert error.key == "checkpoint.nonfinite" and "model.norm.weight" in str(error)


def test_a_gguf_file_cut_off_after_it_was_opened_is_refused(tmp_path):
    weights = open_weights(written(tmp_path))
    data = weights.path.read_bytes()
    weights.path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError) as caught:
        for name in weights.shapes:
            weights.read(name, torch.float32)
    assert caught.value.key == "gguf.truncated"


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory) -> bytes:
    reference = Family("small", "Qwen2", dict(num_key_value_heads=2, num_hidden_layers=1)).reference()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", reference, "Qwen2", kind="Q8_0").read_bytes()


@settings(max_examples=250, derandomize=True, deadline=2000)
@given(st.data())
def test_a_mutated_gguf_file_loads_or_is_refused(tmp_path_factory, small_gguf, data):
    path = tmp_path_factory.getbasetemp() / "mutated-model.gguf"
    damaged = bytearray(small_gguf)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(8, 2000))  # metadata, tensor table and the first tensors
        match data.draw(st.integers(0, 2)):
            case 0:
                damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case 1:
                damaged[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from([0, 1, 6, 1 << 24, 1 << 31])))
            case 2:
                del damaged[at : at + data.draw(st.integers(1, 20))]
    path.write_bytes(damaged)
    loads_or_says_why(path)
