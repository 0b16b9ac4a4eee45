"""The shapes in the signatures are true: every one of them checked on every call, while runs are looked into.

The check is an import hook, so it has a process of its own.
"""

import subprocess
import sys

import pytest

from tiny_model import make_tiny_model

HOOK = """
import sys
from jaxtyping import install_import_hook

ROOMS = ("probe", "analysis", "observe", "experiments")
hook = install_import_hook([f"decodescope.{room}" for room in ROOMS], "beartype.beartype")

import torch
from decodescope.model.checkpoint import load_model
from decodescope.observe.recording import Recording, Watch
from decodescope.probe import attention_pattern

from pathlib import Path
from decodescope.cli.main import main
from decodescope.model.kv_cache import KVCache
"""

RECORD = """
model, _ = load_model(Path(sys.argv[1]))
kept = "layers.*.pattern", "layers.*.scores", "resid_post", "q_rot", "logits"
for positions in (None, (2, 6)):
    recording = Recording(model.config, Watch(kept, ("*",), positions=positions, clock=True))
    cache, start = KVCache(model.config.num_hidden_layers), 0
    for step, chunks in enumerate(([5, 4], [1], [1])):
        tap = recording.begin(step, start, start + sum(chunks))
        for length in chunks:
            model(torch.arange(start, start + length)[None], cache, tap=tap)
            start += length
        recording.end()
    assert recording.summaries and not recording.dropped
    assert recording["layers.0.pattern"][0].shape == (4, 9 if positions is None else 2, 9)
    assert recording.reconstruction_error < 1e-5
"""

COMMANDS = """
for command in (
    ["forward", "--values", "--steps", "2"],
    ["forward", "--rope"],
    ["lens", "--steps", "2"],
    ["attention", "--steps", "2", "--position", "all"],
    ["kv", "--lengths", "4"],
):
    assert main([*command, "Hello", "-m", sys.argv[1]]) == 0, command
"""


def checked(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code with the hook installed."""
    command = [sys.executable, "-c", HOOK + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["qwen2-gqa", "qwen2-window", "qwen3-gqa", "llama-mqa-tied"])
def test_every_shape_holds_while_all_sites_are_recorded(name, tiny_folders):
    done = checked(RECORD, tiny_folders[name])
    assert done.returncode == 0, done.stderr


def test_every_shape_holds_in_the_commands_that_look_inside(tmp_path):
    done = checked(COMMANDS, make_tiny_model(tmp_path / "tiny"))
    assert done.returncode == 0, done.stderr


def test_a_wrong_shape_is_found():
    done = checked("attention_pattern(torch.zeros(2, 3, 4))")
    assert done.returncode != 0 and "TypeCheckError" in done.stderr
