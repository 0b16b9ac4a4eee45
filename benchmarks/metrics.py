"""What the metrics of a step cost: each step of the starter model is timed, and then telling `Metrics` of it.

Everything that a step may bring is on: seven sampler stages, two guards, an answer long enough for the search for
loops to matter. Prints, for one row and for several that share each pass, the median step with all that is
recorded of it, the median time that its metrics take, and the median of the ratios step by step.
"""

import argparse
import statistics
import time

from recording import PROMPT

from decodescope import RunOptions, Session
from decodescope.monitor.metrics import Metrics

SAMPLING = {
    "temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 1,
}  # fmt: skip


def measured(session: Session, rows: int, tokens: int) -> list[tuple[float, float]]:
    """Seconds of every pass but the first, and of telling the metrics of its `rows` steps."""
    options = RunOptions(
        SAMPLING, max_new_tokens=tokens, ignore_eos=True, guards=("loop=warn", "entropy=0.01:warn")
    )
    live = session.start([session.prompt(PROMPT)] * rows, options)
    metrics, found = Metrics("model"), list[tuple[float, float]]()
    pass_s = told_s = 0.0
    last = time.perf_counter()
    for at, (row, step) in enumerate(live.steps()):
        now = time.perf_counter()
        pass_s += now - last
        metrics.stepped(str(row), step, now - last)
        last = time.perf_counter()
        told_s += last - now
        if at % rows == rows - 1:
            found.append((pass_s, told_s))
            pass_s = told_s = 0.0
    return found[1:]


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    session = Session.open(given.model)
    measured(session, 1, 8)  # warm up
    for rows in given.rows:
        found = measured(session, rows, given.tokens)
        step, told = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(told / step for step, told in found)
        print(
            f"{rows} row(s): step {step * 1e3:.2f} ms, metrics {told / rows * 1e6:.0f} µs a row, "
            f"{ratio:.3%} of the step (goal 1 %)"
        )


if __name__ == "__main__":
    main()
