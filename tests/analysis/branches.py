"""Steps of a branch for the tests: only what a question reads is chosen, the rest is plain."""

from dataclasses import replace
from typing import Any

from decodescope.trace.records import Kv, Memory, Step, Timing

_PLAIN = Step(
    step=0, position=5, token_id=0, bytes_hex="", text="", delta_text="", node=0, parent=None, rank=1,
    logprob_nats=-0.7, prob=0.5, prob_final=0.6, entropy_nats=1.0, margin_logits=0.3, candidates=(), stages=(),
    kv=Kv(5, 1000, 2000), timing=Timing(0.05, 0.001, 0.06), memory=Memory(10**9, None),
)  # fmt: skip


def a_step(number: int = 0, **chosen: Any) -> Step:
    parent = number - 1 if number else None
    return replace(_PLAIN, step=number, position=5 + number, node=number, parent=parent, **chosen)
