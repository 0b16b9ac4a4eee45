"""How long a model takes to open, in fresh processes: its file on the disk, and in the page cache."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from decodescope.experiments.bench.messages import Setup
from decodescope.experiments.bench.page_cache import make_cold
from decodescope.experiments.bench.process import Process
from decodescope.experiments.bench.records import LoadRow

COLD, WARM = "cold", "warm"


class Loads:
    """Opens the same model again and again. `no_cold`: the file could not be made cold."""

    def __init__(self, files: Sequence[Path], setup: Setup) -> None:
        self._files, self._setup = files, setup
        self._seconds: dict[str, list[float]] = {COLD: [], WARM: []}
        self.no_cold = False

    def run(self, rounds: int) -> Iterator[None]:
        """Cold, warm, cold, warm ...: yields after each. What was read cold is warm afterwards."""
        for _ in range(rounds):
            for state in (COLD, WARM):
                if state == COLD and not make_cold(self._files):
                    self.no_cold = True
                else:
                    self._open(state)
                yield

    def rows(self) -> tuple[LoadRow, ...]:
        """What was measured so far."""
        return tuple(
            LoadRow(state, median(each), min(each), max(each), len(each))
            for state, each in self._seconds.items()
            if each
        )

    def _open(self, state: str) -> None:
        process = Process(self._setup)
        process.close()
        self._seconds[state].append(process.opened.open_s)
