"""A model whose layers lie on disk computes the very numbers of one in memory, and holds two layers at a time."""

import gc
import shutil
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf_checkpoints import write_gguf
from torch import Tensor

from decodescope.errors import DecodescopeError, ResourceError
from decodescope.model.checkpoint import fill
from decodescope.model.decoder import Block, CausalLM
from decodescope.model.kernels import available
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes
from decodescope.model.precision import choose_precision
from decodescope.model.streaming import matrices_on_disk, measured_read_speed, spread
from decodescope.model.weights import Weights, open_weights
from families import Family

CPU = torch.device("cpu")
IDS = torch.arange(22).view(2, 11)
EVERY_LAYER = frozenset(range(3))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Our corner of the disk for what the checkpoint does not hold as it is needed."""
    available()  # compiled kernels lie in the usual place
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layers"


def opened(weights: Weights, dtype: str | None, on_disk: frozenset[int] = frozenset()) -> CausalLM:
    return fill(weights, choose_precision(weights, dtype, "none", CPU), on_disk=on_disk)


def both(path: Path, dtype: str | None, on_disk: frozenset[int] = EVERY_LAYER) -> tuple[CausalLM, CausalLM]:
    weights = open_weights(path)
    return opened(weights, dtype), opened(weights, dtype, on_disk)


def decoded(model: CausalLM) -> Tensor:
    """Logits of a prompt in two pieces and of four decoded positions, two rows wide."""
    cache = KVCache(model.config.num_hidden_layers)
    pieces = (IDS[:, :5], IDS[:, 5:], *(IDS[:, at : at + 1] for at in range(4)))
    return torch.cat([model(piece, cache, every_logit=True) for piece in pieces], dim=1)


def nameless(model: CausalLM, path: Path) -> set[str]:
    """The matrices that were written elsewhere than in the checkpoint at `path`."""
    named = matrices_on_disk(model)
    return {name for name, matrix in named.items() if path not in (matrix.file.path, matrix.file.path.parent)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_logits_are_those_of_the_model_in_memory(family, tiny_folders, dtype):
    resident, streamed = both(tiny_folders[family.name], dtype)
    assert torch.equal(decoded(streamed), decoded(resident))
    assert len(matrices_on_disk(streamed)) == 21 and not matrices_on_disk(resident)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_any_number_of_layers_may_lie_on_disk(tmp_path, count):
    Family("seven", "Qwen2", dict(num_key_value_heads=2, num_hidden_layers=7)).save(tmp_path / "model")
    resident, streamed = both(tmp_path / "model", None, spread(count, 7))
    assert torch.equal(decoded(streamed), decoded(resident))
    assert torch.equal(decoded(streamed), decoded(resident))  # once more, from whatever was read ahead


def test_layers_on_disk_are_spread_evenly():
    assert spread(3, 9) == {1, 4, 7}
    for layers in (1, 5, 28):
        for count in range(1, layers + 1):
            on_disk = sorted(spread(count, layers))
            assert len(on_disk) == count and on_disk[0] >= 0 and on_disk[-1] < layers
            gaps = {after - before for before, after in pairwise(on_disk)}
            assert not gaps or max(gaps) - min(gaps) <= 1
    assert not spread(0, 28)


def test_what_the_checkpoint_holds_as_needed_is_not_written_again(tiny_folders, cache):
    path = tiny_folders["llama-gqa"]
    _, streamed = both(path, None)
    assert not nameless(streamed, path) and not cache.exists()


def test_other_numbers_than_the_checkpoints_are_written_to_a_file_without_a_name(tiny_folders, cache):
    path = tiny_folders["llama-gqa"]
    _, streamed = both(path, "bfloat16")
    assert len(nameless(streamed, path)) == 21
    assert list(cache.iterdir()) == []  # nothing to clear up, whatever becomes of the process


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_blocks_of_a_gguf_file_are_read_where_they_lie(tmp_path, architecture, dtype):
    model = Family("blocks", architecture, dict(num_key_value_heads=2, intermediate_size=64)).reference()
    path = write_gguf(tmp_path / "m.gguf", model, architecture, kind="Q8_0")
    weights = open_weights(path)
    packed = choose_precision(weights, dtype, "none", CPU).matrices is None
    resident, streamed = both(path, dtype)
    assert torch.equal(decoded(streamed), decoded(resident))
    written = nameless(streamed, path)
    if not packed:
        assert len(written) == 21
    else:  # llama.cpp's order of q and k is not ours
        moved = {name for name in matrices_on_disk(streamed) if name.endswith(("q_proj", "k_proj"))}
        assert written == (moved if architecture == "Llama" else set())


def test_two_layers_are_held_at_a_time(tiny_folders):
    resident, streamed = both(tiny_folders["qwen2-gqa"], None)
    matrices = {name: matrix.nbytes for name, matrix in matrices_on_disk(streamed).items()}
    layer = sum(size for name, size in matrices.items() if ".0." in name)
    assert sum(matrices.values()) == 3 * layer
    assert layer % 64 == 0
    assert held_bytes(streamed) == held_bytes(resident) - 3 * layer + 2 * layer
    streamed(IDS)
    assert held_bytes(streamed) == held_bytes(resident) - layer


def test_rows_can_be_read_between_passes(tiny_folders):
    resident, streamed = both(tiny_folders["qwen2-gqa"], None)
    for rows in (slice(None), slice(3, 9)):
        here, there = (model.model.layers[1].self_attn.o_proj[rows] for model in (resident, streamed))
        assert torch.equal(here, there)


def test_a_pass_that_is_broken_off_spoils_none_that_follow(tiny_folders):
    resident, streamed = both(tiny_folders["qwen2-gqa"], None)
    expected = decoded(resident)
    for layer in range(3):
        fault = streamed.model.layers[layer].mlp.register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            streamed(IDS)
        fault.remove()
        here, there = (model.model.layers[layer].mlp.down_proj[:] for model in (resident, streamed))
        assert torch.equal(here, there)
        assert torch.equal(decoded(streamed), expected)
        assert len(matrices_on_disk(streamed)) == 21


def broken(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_that_shrinks_is_a_clear_fault(tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders["qwen2-gqa"], tmp_path / "model")
    _, streamed = both(folder, None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ResourceError, match="safetensors"):
        streamed(IDS)


def test_a_place_that_cannot_be_written_is_a_clear_fault(tiny_folders, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="layers"):
        both(tiny_folders["qwen2-gqa"], "bfloat16")


def test_layers_on_disk_are_for_the_main_memory(tiny_folders):
    weights = open_weights(tiny_folders["qwen2-gqa"])
    with pytest.raises(DecodescopeError, match="cuda"):  # without such a device, that alone is said
        fill(weights, choose_precision(weights, None, "none", CPU), "cuda", on_disk=EVERY_LAYER)


def test_the_speed_of_the_disk_is_measured_on_a_layer(tiny_folders):
    _, streamed = both(tiny_folders["qwen2-gqa"], "bfloat16")
    assert 1e3 < measured_read_speed(streamed) < 1e12  # bytes a second, of any disk


def test_a_model_takes_its_reader_and_its_memory_along(tiny_folders):
    _, streamed = both(tiny_folders["qwen2-gqa"], None)
    streamed(IDS)
    block = weakref.ref(streamed.model.layers[0])
    assert isinstance(block(), Block)
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("layers-on-disk")]
    assert readers
    del streamed
    gc.collect()
    assert block() is None
    readers[-1].join(5)
    assert not readers[-1].is_alive()
