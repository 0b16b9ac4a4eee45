"""Installing: the wheel holds what it needs, and the Dockerfile's own steps work in a clean environment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile copies, and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            place = folder / target if target.rstrip("/").endswith(source) else folder / target / source
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    return folder


def test_the_wheel_carries_the_sentences_and_the_type_marker(context, tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, context)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("locale/en.json", "locale/zh.json", "py.typed", "text/template_worker.py"):
        assert f"decodescope/{name}" in names


def test_the_steps_of_the_dockerfile_give_a_program_that_runs(context, tmp_path):
    """The image cannot be built without an engine; its pip steps are run as they stand, in a new environment."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    version = re.search(r"ARG TORCH_VERSION=(\S+)", DOCKERFILE)
    steps = re.findall(r"^RUN (pip install .+)$", DOCKERFILE, re.MULTILINE)
    assert version and len(steps) == 2
    for step in steps:
        # The index of CPU wheels is the image's; here the machine's own package index serves.
        command = step.replace("${TORCH_VERSION}", version[1]).replace('--index-url "${TORCH_INDEX}"', "")
        run(python, "-m", *shlex.split(command), "--quiet", cwd=context)
    program = tmp_path / "venv" / "bin" / "decodescope"
    assert "run" in run(program, *shlex.split("--help"))
    assert "7,615,616,512" in run(program, "model", "--config", ROOT / "docs/examples/qwen2.5-7b-instruct.json")


def test_pins_are_exact_and_torch_carries_no_local_suffix():
    lines = (ROOT / "constraints.txt").read_text().split()
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
