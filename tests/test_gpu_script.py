"""`benchmarks/gpu.py` is meant for machines that few have: here its logic runs on the processor, so that it stays true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repository import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=580)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without a GPU; ends nowhere")
def test_without_a_gpu_it_says_so_in_one_sentence():
    done = script()
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == [
        "No GPU here: run this where there is one, or try it with --device cpu --quick."
    ]


@pytest.mark.full
def test_all_of_it_runs_and_every_check_passes_on_the_processor(small_path, tmp_path: Path):
    done = script("-m", str(small_path), "--device", "cpu", "--quick", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    left_out = {check["name"] for check in found["checks"] if check["passed"] is None}
    assert left_out <= {"layers over several GPUs", "one block compiled"}
    assert {check["name"] for check in found["checks"]} >= {
        "nf4, by token",
        "int8 cache",
        "flash attention",
        "one block",
    }
    assert len(found["checks"]) >= 28
    assert found["bench"]["decode"] and found["bench"]["prefill"] and found["bench"]["complete"]
