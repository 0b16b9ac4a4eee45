"""What settings side by side cost: twelve rows of `sample` beside one, in turn, on the starter model.

Prints seconds (prefill and decode, loading left out) of one row and of twelve, their ratio pair by pair, and how
far the memory rose, beside what the twelve rows' own keys and values take by the formula; then where the time of
twelve rows goes. The target is a ratio under 2.5, better 2. Set GOMP_SPINCOUNT=10000, as the command line does, so
that a busy machine does not decide.
"""

import argparse
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from decodescope import RunOptions, Session
from decodescope.experiments.sample import SideBySide
from decodescope.experiments.sample_grid import Grid, parse_grid, settle
from decodescope.experiments.sample_records import SampleReport
from decodescope.text.chat import Prompt

PROMPT = "用一句话解释什么是大语言模型"
ONE = parse_grid(["temperature=0.7", "top_p=0.9"], "42")
TWELVE = parse_grid(["temperature=0.3,0.7,1.0,1.5", "top_p=0.9"], "42,7,1")


def decoded(session: Session, prompt: Prompt, grid: Grid, tokens: int) -> SampleReport:
    """All rows of a grid, the same number of tokens each."""
    study = SideBySide(session, prompt, grid, RunOptions(max_new_tokens=tokens, ignore_eos=True))
    for _ in study.steps():
        pass
    return study.report()


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The most resident bytes of this process while inside, looked at every ten milliseconds."""
    process, most, stop = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def time_pairs(session: Session, prompt: Prompt, tokens: int, pairs: int) -> None:
    """Print one line a pair, the median ratio, and that of the quickest, which a busy machine disturbs least."""
    seconds = []
    for _ in range(pairs):
        one, twelve = (decoded(session, prompt, grid, tokens).seconds for grid in (ONE, TWELVE))
        seconds.append((one, twelve))
        load = os.getloadavg()[0]
        print(f"one row {one:6.2f} s   twelve {twelve:6.2f} s   ratio {twelve / one:.2f}   load {load:.1f}")
    ratio = statistics.median(twelve / one for one, twelve in seconds)
    quickest = min(twelve for _, twelve in seconds) / min(one for one, _ in seconds)
    print(f"ratio: median {ratio:.2f}, of the quickest {quickest:.2f} (target 2.5, stretch 2)")


def tell_memory(session: Session, prompt: Prompt, tokens: int) -> None:
    """Print what twelve rows take beside the weights, and what their suffixes alone are by the formula."""
    before = psutil.Process().memory_info().rss
    with watched_memory() as most:
        decoded(session, prompt, TWELVE, tokens)
    position = session.run(prompt, max_new_tokens=1).run.kv_bytes_per_token
    suffixes = 12 * tokens * position
    print(f"memory rose by {(most[0] - before) / 2**20:.0f} MiB; 12 suffixes are {suffixes / 2**20:.0f} MiB")


def tell_parts(session: Session, prompt: Prompt, tokens: int) -> None:
    """Print the milliseconds of one row's step inside and outside the forward pass."""
    parts = {"forward": 0.0, "choice": 0.0, "summary": 0.0}
    grid = [row.params for row in settle(TWELVE, session.settings)]
    options = RunOptions(max_new_tokens=tokens, ignore_eos=True, candidates=1)
    live = session.side_by_side([prompt] * len(grid), grid, options)
    for row, step in live.steps():
        if step.step and row == 0:  # these two are of the whole batch
            parts["forward"] += step.timing.forward_s
            parts["choice"] += step.timing.sample_s
        if step.step:
            parts["summary"] += step.timing.total_s - step.timing.forward_s - step.timing.sample_s
    rows = (tokens - 1) * len(grid)
    print(
        "   ".join(f"{name} {seconds / rows * 1e3:.2f} ms" for name, seconds in parts.items()) + " a row and step"
    )


def main() -> None:
    """Time, then memory, in each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    for dtype in given.dtype:
        session = Session.open(given.model, dtype=dtype)
        prompt = session.prompt(PROMPT)
        decoded(session, prompt, ONE, given.tokens)  # warm up
        print(f"{dtype}, {len(prompt.ids)} prompt tokens, {given.tokens} new ones a row")
        tell_memory(session, prompt, given.tokens)  # before anything else with twelve rows leaves room behind
        time_pairs(session, prompt, given.tokens, given.pairs)
        tell_parts(session, prompt, given.tokens)


if __name__ == "__main__":
    main()
