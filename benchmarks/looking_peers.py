"""What looking inside costs beside other tools: the same model, dtype, prompt, tokens and inner values.

Every tool runs the starter model's dequantised float32 weights (one copy in memory, shared by all) and decodes the
same prompt greedily (`peers/` shows how). Measured: seconds of a new token, the prefill left out, all ways in turn
in every round. That the tools agree on the ids, and on the values where they keep the same, is checked before.

"Same values" are q, k, v, attn_out, mlp_out and resid_post of every layer and the logits, at each new position.
"Whole": the whole sequence runs again for every token. "As it comes": the tool's own defaults. Beside it: how long
`torch.sum` takes to read once the weights that a step needs; a good kernel reads faster.

Needs the peers: `pip install transformers accelerate transformer-lens nnsight` beside decodescope.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from peers import ours
from peers import with_lens as tl
from peers import with_nnsight as nns
from peers import with_transformers as hf
from peers.decoding import Seen, Values

from decodescope import Session
from decodescope.text.chat import Prompt

Way = Callable[[Prompt, int], Seen]

BARE, OURS, REFERENCE = "decodescope, bare", "decodescope, same values", "transformers, hooks, same values"
PACKAGES = ("decodescope", "torch", "transformers", "nnsight", "transformer-lens")
TOLERANCE = 1e-4  # relative, norm-wise: float32 sums in different orders through 24 layers


@dataclass(frozen=True, slots=True)
class Row:
    """One way of decoding, medians over all rounds.

    `over_bare` and `ours_over_it` are ratios of two ways in the same round: to our bare step, and of our way with
    the same values to this one. `held_bytes` is the memory behind the values of one step, `value_bytes` without
    what is only held because the values are views into it.
    """

    name: str
    step_ms: float
    over_bare: float
    ours_over_it: float
    tensors: int
    value_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """All ways at one length of context. `weights_read_ms`: to read once what a step reads of the weights."""

    context: int
    weights_read_ms: float
    load_average: float
    rows: list[Row]


def main() -> None:
    """Check, measure, print, and write what was measured where that is asked for."""
    given = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")  # the peers' own deprecations
    session = Session.open(dtype="float32")
    ways = open_ways(session)
    print(" ".join(f"{package} {version(package)}" for package in PACKAGES), f"threads {torch.get_num_threads()}")
    tables: list[Table] = []
    for context in given.contexts:
        prompt = counting_prompt(session, context)
        check(ways, prompt)
        tables.append(measure(session, ways, prompt, given))
        report(tables[-1])
    if given.json:
        given.json.write_text(json.dumps([asdict(table) for table in tables], indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1000], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12, help="new tokens of each way and round")
    parser.add_argument("--whole-tokens", type=int, default=2, help="the same where each runs the whole sequence")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args()


def open_ways(session: Session) -> dict[str, Way]:
    """Every way by its name, each tool with a model object of its own."""
    bare, tokenizer = hf.transformers_model(session), hf.transformers_tokenizer(session)
    traced, lens = nns.nnsight_model(session, tokenizer), tl.lens_model(session, tokenizer)
    return {
        BARE: partial(ours.bare, session),
        OURS: partial(ours.tapped, session),
        "decodescope, run, same values": partial(ours.observed, session),
        "decodescope, run as it comes": partial(ours.recorded, session),
        "decodescope, fingerprints of every site": partial(ours.fingerprinted, session),
        "transformers, bare loop": partial(hf.bare, bare),
        REFERENCE: partial(hf.hooks, bare),
        "transformers, generate": partial(hf.generate, bare),
        "transformers, generate + hidden states, logits": partial(
            hf.generate, bare, output_hidden_states=True, output_logits=True
        ),
        "nnsight, iter, same values": partial(nns.reads, traced),
        "nnsight, cache of modules, same values": partial(nns.cache_some, traced),
        "nnsight, cache() as it comes": partial(nns.cache_all, traced),
        "TransformerLens, whole, same values": partial(tl.whole, lens),
        "TransformerLens, with KV cache, same values": partial(tl.cached, lens),
        "TransformerLens, whole, as it comes": partial(tl.default, lens),
    }


def counting_prompt(session: Session, tokens: int) -> Prompt:
    """A multiplication table cut to this many tokens: what comes next is never a matter of rounding."""
    table = "\n".join(f"{n} × 7 = {n * 7}" for n in range(1, tokens))
    prompt = session.prompt(table, chat=False)
    return replace(prompt, tokens=prompt.tokens[:tokens])


def check(ways: dict[str, Way], prompt: Prompt) -> None:
    """All ways choose the same tokens, and those that keep the same values keep the same numbers."""
    expected = ways[REFERENCE](prompt, 4)
    for name, way in ways.items():
        seen = way(prompt, 2 if "whole" in name else 4)
        if seen.ids != expected.ids[: len(seen.ids)]:
            raise SystemExit(f"{name}: chose {seen.ids}, not {expected.ids}")
        if "same values" in name:
            worst = max(_difference(seen.kept[1], expected.kept[1]))
            if worst > TOLERANCE:
                raise SystemExit(f"{name}: values differ by {worst:.1e}")


def _difference(values: Values, expected: Values) -> Iterable[float]:
    """Relative, of every value."""
    if values.keys() != expected.keys():
        raise SystemExit(f"kept others: {sorted(values.keys() ^ expected.keys())[:4]}")
    for address, value in expected.items():
        yield float((values[address].flatten() - value.flatten()).norm() / value.norm())


def measure(session: Session, ways: dict[str, Way], prompt: Prompt, given: argparse.Namespace) -> Table:
    """Rounds of all ways in turn, each round starting with another one."""
    names, weights = list(ways), stepped_weights(session)
    times: dict[str, list[float]] = {name: [] for name in names}
    reads: list[float] = []
    sizes: dict[str, tuple[int, int, int]] = {}
    for turn in range(given.rounds):
        print(f"{len(prompt.ids)} tokens, round {turn + 1} of {given.rounds}", file=sys.stderr)
        start = turn * len(names) // given.rounds
        reads.append(read_seconds(weights))
        for name in names[start:] + names[:start]:
            seen = ways[name](prompt, given.whole_tokens if "whole" in name else given.tokens)
            times[name].append(statistics.median(seen.seconds))
            sizes[name] = held(seen.held.values())
    rows = [Row(name, *_compared(times, name), *sizes[name]) for name in names]
    return Table(len(prompt.ids), statistics.median(reads) * 1e3, os.getloadavg()[0], rows)


def _compared(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Milliseconds, and both ratios of a row."""
    own = times[name]
    return statistics.median(own) * 1e3, _ratio(own, times[BARE]), _ratio(times[OURS], own)


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the rounds' ratios, so that a drifting machine does not decide."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def stepped_weights(session: Session) -> list[torch.Tensor]:
    """The matrices that a decoding step reads whole: all but the embedding."""
    named = session.model.named_parameters()
    return [weight for name, weight in named if weight.ndim == 2 and "embed_tokens" not in name]


def read_seconds(weights: Iterable[torch.Tensor]) -> float:
    """Seconds to read them once."""
    begun = time.perf_counter()
    for weight in weights:
        weight.sum()
    return time.perf_counter() - begun


def held(values: Collection[torch.Tensor]) -> tuple[int, int, int]:
    """Different tensors, their bytes, and the bytes of the memory they keep alive; aliases count once."""
    views = {(value.data_ptr(), value.shape): value.nbytes for value in values}
    stores = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    return len(views), sum(views.values()), sum(stores.values())


def report(table: Table) -> None:
    """One line a way."""
    limit = f"reading the weights once takes {table.weights_read_ms:.1f} ms; load {table.load_average:.1f}"
    print(f"\n{table.context} tokens of context; {limit}")
    print(f"{'':<48}{'ms/token':>9}{'x bare':>8}{'ours/it':>9}{'tensors':>9}{'MB/token':>10}{'MB held':>9}")
    for row in table.rows:
        print(
            f"{row.name:<48}{row.step_ms:9.1f}{row.over_bare:8.3f}{row.ours_over_it:9.3f}"
            f"{row.tensors:9}{row.value_bytes / 1e6:10.2f}{row.held_bytes / 1e6:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
