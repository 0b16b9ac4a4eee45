"""decodescope: its bare loop, its run, and both observed."""

import time
from collections.abc import Iterator

from decodescope import RunOptions, Session
from decodescope.generate import Decoding, Limits
from decodescope.observe.recording import Recording, Watch
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
from decodescope.text.chat import Prompt
from peers.decoding import SITES, Seen

_WANTED = [*(f"layers.*.{site}" for site in SITES), "logits"]


def bare(session: Session, prompt: Prompt, count: int) -> Seen:
    """The loop alone: forward and choose, nothing observed."""
    return _timed(_loop(session, prompt, count, None))


def tapped(session: Session, prompt: Prompt, count: int) -> Seen:
    """The loop alone with the common values kept: what the other tools' loops do with theirs."""
    watch = Watch(keep=_WANTED, steps=range(1, count))
    recording = Recording(session.model.config, watch)
    return _with_values(_timed(_loop(session, prompt, count, recording)), session, recording, count)


def recorded(session: Session, prompt: Prompt, count: int) -> Seen:
    """A run as it comes: 50 candidates and the summary of the distribution of every step."""
    return _timed(_run(session, prompt, count))


def observed(session: Session, prompt: Prompt, count: int) -> Seen:
    """The same run, with the common values kept."""
    with session.observe(_WANTED, steps=range(1, count)) as recording:
        seen = _timed(_run(session, prompt, count))
    return _with_values(seen, session, recording, count)


def fingerprinted(session: Session, prompt: Prompt, count: int) -> Seen:
    """The same run, with a fingerprint of every site and layer."""
    with session.observe(summarise=["*"], steps=range(1, count)):
        return _timed(_run(session, prompt, count))


def _loop(session: Session, prompt: Prompt, count: int, recording: Recording | None) -> Iterator[int]:
    decoding = Decoding(session.model, [prompt.ids], [Sampler(SamplingParams(temperature=0))], Limits(count))
    for step in range(count):
        decoding.tap = recording.begin(step, *decoding.next_pass()) if recording else None
        decoding.forward()
        if recording and decoding.tap:
            recording.end()
        (decoded,) = decoding.choose()
        yield decoded.choice.token_id


def _with_values(seen: Seen, session: Session, recording: Recording, count: int) -> Seen:
    layers = range(session.model.config.num_hidden_layers)
    addresses = [*(f"layers.{layer}.{site}" for layer in layers for site in SITES), "logits"]
    seen.kept = {step: {name: recording[name][step] for name in addresses} for step in range(1, count)}
    seen.held = seen.kept[count - 1]
    return seen


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
