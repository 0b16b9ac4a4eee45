"""What recording adds to the memory of a process, measured in one of its own on the real starter."""

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 20_000_000
STEPS = 32

MEASURE = """
import sys
from pathlib import Path
from decodescope import Session
from decodescope.observe.selection import places

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

STEPS, KEEP = int(sys.argv[2]), sys.argv[3:]
session = Session.open(sys.argv[1], dtype="float32")
session.run("春天", max_new_tokens=4, ignore_eos=True)  # what a run itself needs is there now
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident, from now on: proc(5)
before = kilobytes("VmRSS:")
with session.observe(KEEP, summarise=["*"]) as recording:
    session.run("春天", max_new_tokens=STEPS, ignore_eos=True)
print(kilobytes("VmHWM:") - before, kilobytes("VmRSS:") - before)
assert len(recording.summaries) == STEPS * len(places(session.model.config))
"""

needs_reset = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak is read from /proc and set back there; runs on Linux",
)


def added(path: Path, *keep: str) -> tuple[int, int]:
    """Bytes by which a run that is recorded, trace and all, adds to the peak of a process, and what stays."""
    command = [sys.executable, "-c", MEASURE, str(path), str(STEPS), *keep]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, after = (int(number) * 1024 for number in done.stdout.split())
    return peak, after


@needs_reset
@pytest.mark.usefixtures("all_threads")
def test_fingerprints_of_all_sites_and_32_steps_add_under_20_megabytes(starter_path):
    peak, after = added(starter_path)
    assert 0 < after <= peak < MOST, f"peak +{peak / 1e6:.1f} MB, afterwards +{after / 1e6:.1f} MB"


@needs_reset
@pytest.mark.full
@pytest.mark.usefixtures("all_threads")
def test_the_measurement_sees_tensors_that_are_kept(starter_path):
    _, after = added(starter_path, "*")
    assert after > MOST
