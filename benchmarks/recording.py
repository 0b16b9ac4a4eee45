"""What the default recording costs: the same decode with and without it, in turn, on the starter model.

Recording = summary of the raw distribution, 50 candidates, entropy, stages, one SQLite commit a step. Prints the
ratio recorded / bare of the median step (pair by pair, so that a drifting machine does not decide), and what the
recording itself takes in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from decodescope import RunOptions, Session
from decodescope.live import LiveRun
from decodescope.text.chat import Prompt

PROMPT = "用一句话解释什么是大语言模型"


def step_seconds(steps: Iterator[object]) -> list[float]:
    """Seconds of every step but the first, which holds the prefill."""
    times: list[float] = []
    last = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times[1:]


def bare_steps(live: LiveRun) -> Iterator[object]:
    """The loop alone: forward and choose, nothing observed."""
    decoding = live._decoding
    while decoding.active:
        decoding.forward()
        yield decoding.choose()


def one_pair(session: Session, prompt: Prompt, tokens: int) -> tuple[float, float]:
    """Median step without and with recording."""
    options = RunOptions(
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 1}, max_new_tokens=tokens, ignore_eos=True
    )
    bare = statistics.median(step_seconds(bare_steps(session.start([prompt], options))))
    with tempfile.TemporaryDirectory() as folder:
        saving = RunOptions(options.sampling, max_new_tokens=tokens, ignore_eos=True, save=Path(folder) / "run")
        recorded = statistics.median(step_seconds(session.start([prompt], saving).steps()))
    return bare, recorded


def main() -> None:
    """Print one line a pair and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    session = Session.open(given.model)
    prompt = session.prompt(PROMPT)
    one_pair(session, prompt, 4)  # warm up
    pairs = [one_pair(session, prompt, given.tokens) for _ in range(given.pairs)]
    for bare, recorded in pairs:
        print(f"bare {bare * 1e3:7.2f} ms   recorded {recorded * 1e3:7.2f} ms   ratio {recorded / bare:.3f}")
    bare = statistics.median(b for b, _ in pairs)
    added = statistics.median(r - b for b, r in pairs)
    ratio = statistics.median(r / b for b, r in pairs)
    print(
        f"median: bare {bare * 1e3:.2f} ms, recording adds {added * 1e3:.2f} ms, ratio {ratio:.3f} (target 1.05)"
    )


if __name__ == "__main__":
    main()
