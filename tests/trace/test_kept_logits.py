"""Laws of kept logits: they come back bit for bit without torch, and nothing else is read in their place."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_records import edit, plain_run, plain_step

from decodescope.errors import InputError
from decodescope.trace.kept_logits import kept_logits
from decodescope.trace.store import TraceWriter

ROWS = plain_run().vocabulary


def logits(seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).normal(size=ROWS).astype(np.float32)
    made[seed] = -np.inf
    return made


def kept(folder: Path, count: int = 3) -> Path:
    """A run whose first `count` of four steps kept their logits."""
    with TraceWriter.create(folder, plain_run()) as writer:
        for node in range(4):
            writer.write(plain_step(node, node - 1 if node else None, candidates=2))
            if node < count:
                writer.write_tensors({"logits": torch.from_numpy(logits(node))}, node)
    return folder


def block(folder: Path, number: int) -> Path:
    return folder / "tensors" / f"{number:04d}.safetensors"


def test_kept_logits_come_back_bit_for_bit(tmp_path):
    found = kept_logits(kept(tmp_path / "run"))
    assert list(found) == [0, 1, 2] and len(found) == 3 and 3 not in found
    for node, values in found.items():
        assert values.dtype == np.float32 and values.tobytes() == logits(node).tobytes()


def test_a_run_that_kept_none_has_none(tmp_path):
    assert dict(kept_logits(kept(tmp_path / "run", count=0))) == {}


def test_other_tensors_are_not_taken_for_logits(tmp_path):
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write_tensors({"logits": np.zeros(ROWS, np.float32)})  # of no node
        writer.write(plain_step(0, None))
        writer.write_tensors({"logits": logits(0)})
        writer.write_tensors({"logits": np.zeros((1, 5, ROWS), np.float32)})  # the site of that name
        writer.write_tensors({"embed": np.zeros(ROWS, np.float32)})
    found = kept_logits(tmp_path / "run")
    assert list(found) == [0] and np.array_equal(found[0], logits(0))


def test_reading_one_step_reads_one_file(tmp_path):
    folder = kept(tmp_path / "run")
    block(folder, 1).unlink()
    found = kept_logits(folder)
    assert np.array_equal(found[1], logits(1))
    with pytest.raises(InputError, match=r"tensors/0001\.safetensors: No such file"):
        found[0]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="There is no folder"):
        kept_logits(tmp_path / "run")


def swap(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def rewritten(path: Path, **changes: object) -> None:
    """The file with another header, its data as they were."""
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + size].decode()
    for old, new in changes.values():
        assert old in header
        header = header.replace(old, new)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + whole[8 + size :])


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: swap(path, b""),
        lambda path: swap(path, b"\x00" * 7),
        lambda path: swap(path, b"\xff" * 1000),
        lambda path: swap(path, path.read_bytes()[:-4]),
        lambda path: swap(path, path.read_bytes() + b"more"),
        lambda path: rewritten(path, dtype=('"F32"', '"I32"')),
        lambda path: rewritten(path, shape=(f"[{ROWS}]", f"[{ROWS // 2},2]")),
        lambda path: rewritten(path, name=('"logits"', '"\\u001b[31m"')),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to(path)),
    ],
)
def test_a_block_that_is_damaged_or_foreign_is_refused_in_one_sentence(tmp_path, harm):
    folder = kept(tmp_path / "run")
    harm(block(folder, 2))
    found = kept_logits(folder)
    with pytest.raises(InputError, match="Cannot read the kept tensors of the run in") as fault:
        found[1]
    assert str(fault.value).isprintable()
    assert np.array_equal(found[0], logits(0))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder, other = kept(tmp_path / "run"), kept(tmp_path / "other")
    block(folder, 1).unlink()
    block(folder, 1).symlink_to(block(other, 1))
    with pytest.raises(InputError, match="Cannot read the kept tensors"):
        kept_logits(folder)[0]
    (folder / "tensors").rename(tmp_path / "moved")
    (folder / "tensors").symlink_to(tmp_path / "moved", target_is_directory=True)
    with pytest.raises(InputError, match="Cannot read the kept tensors"):
        kept_logits(folder)[1]


@pytest.mark.parametrize("number", [-1, 10**9, 2**62])
def test_whatever_the_index_says_only_blocks_of_the_folder_are_looked_for(tmp_path, number):
    folder = edit(kept(tmp_path / "run"), f"UPDATE tensor SET block = {number} WHERE block = 1")
    with pytest.raises(InputError, match="Cannot read the kept tensors"):
        kept_logits(folder)[0]


def test_logits_are_read_without_torch(tmp_path):
    code = """
import sys
from pathlib import Path
from decodescope.trace.kept_logits import kept_logits
print(len(kept_logits(Path(sys.argv[1]))[2]), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(kept(tmp_path / "run"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{ROWS} False\n", "")
