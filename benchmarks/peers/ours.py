"""decodescope: its bare loop, its run, and its run observed."""

import time
from collections.abc import Iterator

from decodescope import RunOptions, Session
from decodescope.generate import Decoding, Limits
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from decodescope.text.chat import Prompt
from peers.decoding import SITES, Seen


def bare(session: Session, prompt: Prompt, count: int) -> Seen:
    """The loop alone: forward and choose, nothing observed."""

    def tokens() -> Iterator[int]:
        decoding = Decoding(session.model, [prompt.ids], [Sampler(SamplingParams(temperature=0))], Limits(count))
        while decoding.active:
            decoding.forward()
            (decoded,) = decoding.choose()
            yield decoded.choice.token_id

    return _timed(tokens())


def recorded(session: Session, prompt: Prompt, count: int) -> Seen:
    """A run as it comes: 50 candidates and the summary of the distribution of every step."""
    return _timed(_run(session, prompt, count))


def observed(session: Session, prompt: Prompt, count: int) -> Seen:
    """The same run, with the common values kept."""
    names = [f"layers.*.{site}" for site in SITES]
    with session.observe([*names, "logits"], steps=range(1, count)) as recording:
        seen = _timed(_run(session, prompt, count))
    layers = range(session.model.config.num_hidden_layers)
    addresses = [*(f"layers.{layer}.{site}" for layer in layers for site in SITES), "logits"]
    seen.kept = {step: {name: recording[name][step] for name in addresses} for step in range(1, count)}
    seen.held = seen.kept[count - 1]
    return seen


def fingerprinted(session: Session, prompt: Prompt, count: int) -> Seen:
    """The same run, with a fingerprint of every site and layer."""
    with session.observe(summarise=["*"], steps=range(1, count)):
        return _timed(_run(session, prompt, count))


def _run(session: Session, prompt: Prompt, count: int) -> Iterator[int]:
    options = RunOptions({"temperature": 0}, max_new_tokens=count, ignore_eos=True)
    return (step.token_id for _, step in session.start([prompt], options).steps())


def _timed(tokens: Iterator[int]) -> Seen:
    """Every token behind the first, which holds the prefill."""
    seen, last = Seen([], []), time.perf_counter()
    for token in tokens:
        now = time.perf_counter()
        seen.ids.append(token)
        seen.seconds.append(now - last)
        last = now
    del seen.seconds[0]
    return seen
