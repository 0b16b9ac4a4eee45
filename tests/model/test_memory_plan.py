"""Under a limit the most exact way that fits is taken, and what a limited process computes is the same."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from decodescope.errors import InputError
from decodescope.model.footprint import footprint
from decodescope.model.memory_plan import plan_memory
from decodescope.model.precision import choose_precision
from decodescope.model.random_weights import RandomWeights
from decodescope.session import Session

SEVEN = RandomWeights(Path(__file__).parents[2] / "docs" / "examples" / "qwen2.5-7b-instruct.json")
WAYS = [(name, choose_precision(SEVEN, None, name, torch.device("cpu"))) for name in ("none", "int8", "int4")]
PROCESS = 300 << 20
GIB = 1 << 30


def planned(limit_bytes: int) -> tuple[str, int]:
    """The way and the layers on disk."""
    plan = plan_memory(SEVEN, WAYS, PROCESS, limit_bytes)
    assert plan.footprint.peak_bytes <= limit_bytes
    return plan.name, plan.layers_on_disk


def whole(way: int) -> int:
    return footprint(SEVEN, WAYS[way][1], PROCESS, 4096).peak_bytes


def test_each_way_is_taken_as_soon_as_it_fits():
    for index, (name, _) in enumerate(WAYS):
        assert planned(whole(index)) == (name, 0)
        if index + 1 < len(WAYS):
            assert planned(whole(index) - 1) == (WAYS[index + 1][0], 0)
    assert planned(whole(2) - 1)[1] > 0
    assert planned(8 * GIB) == ("int4", 0)


def test_more_memory_never_means_more_layers_on_disk():
    limits = [GIB * tenths // 10 for tenths in range(24, 58)]
    on_disk = [planned(limit)[1] for limit in limits]
    assert on_disk[0] > 20 and on_disk[-1] == 0
    assert all(less >= more for less, more in pairwise(on_disk))


def test_no_fewer_layers_on_disk_would_do():
    plan = plan_memory(SEVEN, WAYS, PROCESS, 4 * GIB)
    assert 3 < plan.layers_on_disk < 28
    closer = footprint(SEVEN, plan.precision, PROCESS, plan.positions, plan.layers_on_disk - 1)
    assert closer.peak_bytes > 4 * GIB


def test_a_limit_that_nothing_fits_says_how_much_would():
    with pytest.raises(InputError, match=r"1\.00 GiB is too little.*2\.\d\d GiB"):
        planned(GIB)


# Weights of 480 MB in 16 bits, nearly all of it in layers. A process that holds them has 830 MiB of data in all (so
# counts the system, room not touched included); this one may have 680.
KEYS = dict(
    architectures=["LlamaForCausalLM"], vocab_size=49_152, hidden_size=576, intermediate_size=4608, num_hidden_layers=24,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=256,
)  # fmt: skip
LIMITED = """
import resource, sys
from decodescope.errors import DecodescopeError
from decodescope.session import Session

config, model, limit, told = *sys.argv[1:4], []
resource.setrlimit(resource.RLIMIT_DATA, (680 << 20,) * 2)
try:
    session = Session.open(
        model, random_weights=config, dtype="bfloat16", threads=1, report=lambda *said: told.append(said[0]),
        max_memory_bytes=int(limit) or None,
    )
except DecodescopeError as fault:
    sys.exit(str(fault))
trace = session.run(session.prompt("春天 is here", chat=False), max_new_tokens=4)
print(*(step.token_id for step in trace.path()), sep=",")
print(*told, trace.run.notes, sep="\\n")
"""
needs_limits = pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA counts all memory of a process on Linux only"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(KEYS))
    return folder


def limited(config: Path, model: Path, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    """A process whose data may take 680 MiB, told of a limit or not."""
    command = [sys.executable, "-c", LIMITED, config, model, str(limit_bytes)]
    return subprocess.run(command, capture_output=True, text=True)


@needs_limits
def test_a_model_larger_than_its_process_may_be_runs_with_layers_on_disk(config, small_path):
    done = limited(config, small_path, 550 << 20)
    assert done.returncode == 0, done.stderr
    ids, plan, cost, notes = done.stdout.splitlines()
    resident = Session.open(str(small_path), random_weights=config, dtype="bfloat16")
    expected = resident.run(resident.prompt("春天 is here", chat=False), max_new_tokens=4)
    assert ids == ",".join(str(step.token_id) for step in expected.path())
    assert "weights as bfloat16" in plan and "of 24 layers on disk" in cost
    assert "note.random_weights" in notes and "note.layers_on_disk" in notes


@needs_limits
def test_without_them_it_does_not(config, small_path):
    done = limited(config, small_path, 0)
    assert done.returncode == 1
    assert "memory" in done.stderr and "Traceback" not in done.stderr
