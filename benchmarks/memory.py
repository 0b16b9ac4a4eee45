"""What `decodescope model` tells of memory against what a run takes, and whether a limited process gets through.

A shape with random weights (the 7B's) is run in processes of their own, one after the other: once for each
precision, held against what was told; then under --max-memory in a process whose data the system limits to as
much (Linux). Needs as much free memory as the largest of them: 16 GB for the 7B in 16 bits.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SEVEN = Path(__file__).resolve().parent.parent / "docs" / "examples" / "qwen2.5-7b-instruct.json"
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 43  # 600 tokens and some
GIB = 1 << 30


def printed(arguments: list[str], limit_bytes: int = resource.RLIM_INFINITY) -> list[dict[str, Any]]:
    """The lines that the program prints under a limit for its data; what it says beside them goes through."""
    done = subprocess.run(
        [sys.executable, "-m", "decodescope", *arguments, "--json"],
        input=PROMPT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes)),
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(config: Path, how: list[str], limit_bytes: int = resource.RLIM_INFINITY) -> tuple[int, int, str]:
    """Bytes of the process at its peak, those of its cache, and its speed in words."""
    started = time.perf_counter()
    arguments = ["run", "-", "--raw", "--random-weights", str(config), "-n", "8", "--ignore-eos", *how]
    *_, step, end = printed(arguments, limit_bytes)
    seconds = time.perf_counter() - started
    speed = f"{seconds:.0f} s in all, first token {end['ttft_s']:.1f} s, {end['decode_tokens_per_s']:.2f} tokens/s"
    return end["peak_rss_bytes"], step["kv"]["allocated_bytes"], speed


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=SEVEN)
    parser.add_argument("--precisions", nargs="*", default=["int4", "int8", "bfloat16"])
    parser.add_argument("--limit-gib", type=int, default=8)
    parser.add_argument("--limited-to", nargs="*", default=["", "bfloat16"], help="a dtype; empty: what fits")
    given = parser.parse_args()
    (card,) = printed(["model", "--config", str(given.config)])
    for name in given.precisions:
        peak, cache, speed = run(given.config, ["--dtype" if "float" in name else "--quantize", name])
        told = card["fit"]["dtypes"][name]["needed_bytes"] + cache
        print(
            f"{name:10} told {told / 1e9:6.2f} GB, took {peak / 1e9:6.2f} GB ({told / peak - 1:+.1%}); {speed}",
            flush=True,
        )
    limit = given.limit_gib * GIB
    for name in given.limited_to:
        how = ["--max-memory", f"{given.limit_gib}GiB", *(["--dtype", name] if name else [])]
        peak, _, speed = run(given.config, how, limit)
        print(f"{name:10} in {limit / 1e9:.2f} GB: took {peak / 1e9:.2f} GB; {speed}", flush=True)


if __name__ == "__main__":
    main()
