"""Loading holds the weights and at most two more tensors, whatever they become: measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decodescope.model.config import parse_config

# The largest tensor is an eighth of the whole, so that holding a file's copy beside the weights would show.
KEYS = dict(
    architectures=["Qwen2ForCausalLM"], vocab_size=9216, hidden_size=1024, intermediate_size=3072, num_hidden_layers=5,
    num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
)  # fmt: skip
CONFIG = parse_config(KEYS)
SHAPES = dict(CONFIG.tensor_shapes())
WEIGHTS = 4 * sum(np.prod(shape) for shape in SHAPES.values())
LARGEST = 4 * 9216 * 1024

MEASURE = """
import sys
from pathlib import Path
import torch
from decodescope.model.checkpoint import load_model
from decodescope.model.kernels import available
from decodescope.model.memory import held_bytes

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

dtype, quantize, threads = sys.argv[2:]
torch.set_num_threads(int(threads))
torch.ones(64, 64) @ torch.ones(64, 64)
available()
before = kilobytes("VmRSS:")
model, _ = load_model(Path(sys.argv[1]), None if dtype == "None" else dtype, quantize=quantize)
print(kilobytes("VmHWM:") - before, kilobytes("VmRSS:") - before, held_bytes(model) // 1024)
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc; runs on Linux"
)


def growth(path: Path, *how: object, script: str = MEASURE) -> tuple[int, int, int]:
    """Bytes by which the process grew at its peak and after loading, and bytes of the weights it holds then."""
    done = subprocess.run([sys.executable, "-c", script, path, *map(str, how)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, after, held = (int(number) * 1024 for number in done.stdout.split())
    return peak, after, held


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "config.json").write_text(json.dumps(KEYS))
    values = torch.rand(LARGEST // 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {name: values[: int(np.prod(shape))].view(shape).clone() for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The same shapes as a `llama` file, whose q and k rows have to be put in order, in Q8_0."""
    path = tmp_path_factory.mktemp("packed") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(5)
    writer.add_context_length(512)
    writer.add_embedding_length(1024)
    writer.add_feed_forward_length(3072)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    blocks = np.random.default_rng(0).integers(0, 256, (9216 * 32, 34), np.uint8)
    blocks[:, :2] = (0, 0x20)  # the scale of every block: float16 0.0078
    names = {
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    for name, shape in SHAPES.items():
        if name.endswith(".bias"):
            continue
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if len(shape) == 1:
            part = "output_norm" if not layer else "attn_norm" if "input" in name else "ffn_norm"
            writer.add_tensor(f"{layer}{part}.weight", np.ones(shape, np.float32))
            continue
        part = names[name.split(".")[-2].removesuffix("_proj")] if layer else "token_embd"
        rows, columns = shape
        raw = blocks[: rows * columns // 32].reshape(rows, -1)
        writer.add_tensor(f"{layer}{part}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of float32: what the weights take; in 4 bits the embedding has 8.
SHARES = [
    ("folder", None, "none", 0.5),
    ("folder", "float32", "none", 1),
    ("folder", None, "int4", 0.155),
    ("packed", None, "none", 0.266),
    ("packed", "float32", "none", 1),
    ("packed", "float16", "none", 0.5),
    ("packed", None, "nf4", 0.149),
]


@needs_proc
@pytest.mark.parametrize(("kind", "dtype", "quantize", "share"), SHARES)
def test_peak_memory_is_the_weights_and_at_most_twice_the_largest_tensor(kind, dtype, quantize, share, request):
    threads = 1 if dtype == "float32" else 16
    peak, after, held = growth(request.getfixturevalue(kind), dtype, quantize, threads)
    assert held == pytest.approx(share * WEIGHTS, rel=0.02)
    assert after > 0.95 * held  # they were really loaded
    assert peak < held + 2 * LARGEST


@needs_proc
def test_the_measurement_sees_a_whole_file_held_beside_the_weights(folder):
    whole = MEASURE.replace("model, _ =", "held = Path(sys.argv[1], 'model.safetensors').read_bytes(); model, _ =")
    peak, _, held = growth(folder, "float32", "none", 2, script=whole)
    assert peak > held + 2 * LARGEST
