"""How long until something is seen: whole processes, the model's file in the page cache.

`tokens` should answer within 1.5 s; `run` should show its first step on the starter within 6 s.
"""

import argparse
import statistics
import subprocess
import sys
import time

PROMPT = "用一句话解释什么是大语言模型"


def seconds_to_first_line(arguments: list[str], marker: str) -> float:
    """Wall time from starting the program until it has printed a line that starts with `marker`."""
    command = [sys.executable, "-u", "-m", "decodescope", *arguments]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(marker):
            break
    elapsed = time.perf_counter() - started
    process.kill()
    process.wait()
    return elapsed


CASES = {
    "--help": (["--help"], ""),
    "tokens": (["tokens", PROMPT, "--json"], "{"),
    "run, first step": (["run", PROMPT, "-n", "2", "--json"], '{"type": "step"'),
}


def main() -> None:
    """Print median and spread of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for name, (arguments, marker) in CASES.items():
        seconds_to_first_line(arguments, marker)  # warm the page cache
        times = sorted(seconds_to_first_line(arguments, marker) for _ in range(runs))
        print(f"{name:<16} median {statistics.median(times):.2f} s   ({times[0]:.2f} - {times[-1]:.2f})")


if __name__ == "__main__":
    main()
