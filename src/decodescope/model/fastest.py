"""`--dtype auto`: which 16-bit numbers this machine multiplies fastest, found by trying for a moment.

Reading a prompt and decoding want different things: on many processors torch multiplies large bfloat16 matrices
several times as fast as float16 ones, and matrix by vector the other way round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decodescope.model.kernels import Arena
from decodescope.model.linear import Linear

CANDIDATES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDTH = 4096  # 32 MiB a matrix: more than most caches hold
_PROMPT, _NEW = 512, 128  # tokens of the task that decides
_ROWS = 128  # of activations tried for a prompt
_LEAST_S = 0.1  # of trying, each


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds a token for each 1e9 weights: while a prompt is read, and while decoding."""

    prompt_s: float
    decode_s: float

    @property
    def task_s(self) -> float:
        """For a prompt of 512 tokens and 128 new ones."""
        return _PROMPT * self.prompt_s + _NEW * self.decode_s


def fastest(device: torch.device) -> tuple[str, dict[str, Speed]]:
    """The dtype with the quicker task, and what was measured of each (on the processor only)."""
    if device.type != "cpu":
        known = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16" if known else "float16"), {}
    speeds = {name: _speed(dtype) for name, dtype in CANDIDATES.items()}
    return min(speeds, key=lambda name: speeds[name].task_s), speeds


@torch.inference_mode()
def _speed(dtype: torch.dtype) -> Speed:
    linear = Linear(_WIDTH, _WIDTH, bias=False)
    linear.hold(Arena().take((_WIDTH, _WIDTH), dtype).fill_(0.01))
    of_activations = torch.float32 if dtype == torch.float16 else dtype
    prompt, token = (torch.full((rows, _WIDTH), 0.01, dtype=of_activations) for rows in (_ROWS, 1))
    weights = _WIDTH * _WIDTH / 1e9
    return Speed(_seconds(lambda: linear(prompt)) / _ROWS / weights, _seconds(lambda: linear(token)) / weights)


def _seconds(run: Callable[[], object]) -> float:
    """The quickest of some runs; the first one warms up."""
    run()
    best, until = float("inf"), time.perf_counter() + _LEAST_S
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
