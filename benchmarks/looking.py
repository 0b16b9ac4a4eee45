"""What looking inside costs: one decode step bare, and with each kind of look, in turn, on the starter model.

Bare is the loop alone, forward and choose. A look is timed from the same loop with a tap in place: fingerprints of
all sites, one attention row of all layers and heads, the residual stream kept whole. Prints the median of the
ratios (pair by pair, so that a drifting machine does not decide) and the milliseconds added. "tap off" is a second
bare loop: what its ratio is away from 1 is noise.
"""

import argparse
import statistics
from collections.abc import Iterator

from recording import PROMPT, step_seconds

from decodescope import LiveRun, RunOptions, Session
from decodescope.observe.recording import Recording, Watch
from decodescope.text.chat import Prompt

LOOKS = {
    "tap off": None,
    "fingerprints of all sites": Watch(summarise=["*"]),
    "attention row, all heads": Watch(keep=["layers.*.pattern"]),
    "residual stream kept": Watch(keep=["layers.*.resid_post"]),
}
GOALS = {"fingerprints of all sites": 1.15, "attention row, all heads": 1.2}


def steps(live: LiveRun, recording: Recording | None, tokens: int) -> Iterator[object]:
    """The loop alone, forward and choose, with a tap or without; the prompt stays cached for the next look."""
    decoding = live._decoding
    live._recording, decoding.tap = recording, None
    for _ in range(tokens):
        with live._looking():
            decoding.forward()
        yield decoding.choose()
    decoding.rewind(1)


def one_round(session: Session, live: LiveRun, tokens: int) -> dict[str, tuple[float, float]]:
    """Seconds of the median step, bare and with each look; a bare run stands before every look."""
    config, found = session.model.config, {}
    for name, watch in LOOKS.items():
        recording = Recording(config, watch) if watch else None
        bare, looked = (statistics.median(step_seconds(steps(live, r, tokens))) for r in (None, recording))
        found[name] = bare, looked
    return found


def measure(session: Session, prompt: Prompt, tokens: int, rounds: int) -> None:
    """Print a line for each look."""
    live = session.start([prompt], RunOptions({"temperature": 0.0}, max_new_tokens=tokens + 2, ignore_eos=True))
    live._decoding.forward()  # the prompt, once for all
    live._decoding.choose()
    one_round(session, live, 4)  # warm up
    found = [one_round(session, live, tokens) for _ in range(rounds)]
    for name in LOOKS:
        pairs = [each[name] for each in found]
        bare = statistics.median(b for b, _ in pairs)
        added = statistics.median(w - b for b, w in pairs)
        ratio = statistics.median(w / b for b, w in pairs)
        goal = f" (goal {GOALS[name]})" if name in GOALS else ""
        print(f"  {name:<28} bare {bare * 1e3:7.2f} ms  added {added * 1e3:6.2f} ms  ratio {ratio:.3f}{goal}")


def main() -> None:
    """Measure every dtype and context that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[36, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    for dtype in given.dtypes:
        session = Session.open(given.model, dtype=dtype)
        for context in given.contexts:
            text = session.prompt((PROMPT + "，") * (context // 8 + 1), chat=False)
            prompt = Prompt(text.text, text.tokens[:context])
            print(f"{dtype}, context {len(prompt.ids)}:")
            measure(session, prompt, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
