"""How far every precision is from float32, token by token: KL divergence and agreement of the first choice.

The reference has the same weights, dense in float32, and sees whole passages. A precision sees every passage of
`corpus.txt` twice: whole, as a prompt is read, and token by token behind a cache, as it decodes (other kernels).
At every position KL(reference || precision) = sum p ln(p / q) in nats, float64 from float32 logits.

Blocks of a GGUF file that need no more bits than asked for stay as they are: what quantising costs shows on
a model in 16 bits (`convert_gguf.py` writes one). The formats of the KV cache are compared with one in 16 bits:
one model, as it is stored, decodes the same tokens behind one cache of each format.
"""

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decodescope.model.cache_formats import FORMATS
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes
from decodescope.open_model import OpenModel

CORPUS = Path(__file__).with_name("corpus.txt")
STORED = "as stored"
PRECISIONS: dict[str, dict[str, Any]] = {
    STORED: {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "nf4": {"quantize": "nf4"},
}
CACHE = "bfloat16"  # what the others are compared with
_AT_ONCE = 1 << 23  # logits in float64 at a time: 64 MiB
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One way of holding a model, or its cache, and how far it is from the reference."""

    name: str
    read: str  # whole, or by token
    weight_bytes: int
    tokens: int
    kl_mean_nats: float
    kl_p99_nats: float
    kl_max_nats: float
    top1_agreement: float


class Tally:
    """What is found position by position."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Compare logits [T, V]."""
        step = max(1, _AT_ONCE // expected.shape[-1])
        for one, other in zip(torch.split(expected, step), torch.split(found, step), strict=True):
            p, q = (each.to("cpu", torch.float64).log_softmax(-1) for each in (one, other))
            self._kl.append((p.exp() * (p - q)).sum(-1))
            self._same.append(p.argmax(-1) == q.argmax(-1))

    def row(self, name: str, read: str, model: CausalLM) -> Row:
        """All positions summed up."""
        kl, same = torch.cat(self._kl), torch.cat(self._same)
        figures = (float(kl.mean()), float(kl.quantile(0.99)), float(kl.max()), float(same.double().mean()))
        return Row(name, read, held_bytes(model), len(kl), *figures)


def passages(opened: OpenModel, count: int | None, length: int | None) -> list[Ids]:
    """The first `count` passages of the corpus, each cut to `length` tokens."""
    texts = [part.partition("\n")[2] for part in CORPUS.read_text(encoding="utf-8").split("%% ")[1:]]
    return [opened.prompt(text, chat=False).ids[:length] for text in texts[:count]]


def whole(model: CausalLM, ids: Ids) -> Tensor:
    """Logits [T, V] of a passage in one pass."""
    logits: Tensor = model(torch.tensor([ids], device=model.device), every_logit=True)[0]
    return logits


def by_token(model: CausalLM, ids: Ids, cache: KVCache) -> Iterator[Tensor]:
    """Logits [1, V] of a passage, a pass for each token."""
    for each in ids:
        yield model(torch.tensor([[each]], device=model.device), cache)[0]


def precisions(opened: OpenModel, names: Sequence[str], texts: list[Ids]) -> Iterator[Row]:
    """Two rows for each precision; `opened` is the reference."""
    for name in names:
        other = opened if name == "float32" else OpenModel.open(str(opened.files.path), **PRECISIONS[name])
        yield from measured(opened.model, other.model, name, texts)
        del other
        gc.collect()  # two models in memory are enough


def measured(reference: CausalLM, model: CausalLM, name: str, texts: list[Ids]) -> Iterator[Row]:
    """Whole passages, and token by token."""
    tallies = {"whole": Tally(), "by token": Tally()}
    for ids in texts:
        expected = whole(reference, ids)
        tallies["whole"].add(expected, whole(model, ids))
        cache = KVCache(model.config.num_hidden_layers)
        tallies["by token"].add(expected, torch.cat(list(by_token(model, ids, cache))))
    for read, tally in tallies.items():
        yield tally.row(name, read, model)


def caches(model: CausalLM, texts: list[Ids]) -> Iterator[Row]:
    """A row for each format of the cache but the one they are compared with."""
    tallies = {name: Tally() for name in FORMATS if name != CACHE}
    for ids in texts:
        held = {name: KVCache(model.config.num_hidden_layers, FORMATS[name]) for name in FORMATS}
        for logits in zip(*(by_token(model, ids, cache) for cache in held.values()), strict=True):
            found = dict(zip(held, logits, strict=True))
            for name, tally in tallies.items():
                tally.add(found[CACHE], found[name])
    for name, tally in tallies.items():
        yield tally.row(f"{name} cache", "by token", model)


def table(rows: Sequence[Row], first: str) -> str:
    """As markdown."""
    heads = (first, "read", "weights", "KL mean", "KL 99 %", "KL max", "same first choice")
    lines = [heads, ("---", "---", *["---:"] * 5)]
    for row in rows:
        kl = (f"{nats:.1e}" for nats in (row.kl_mean_nats, row.kl_p99_nats, row.kl_max_nats))
        size, agreement = f"{row.weight_bytes / 1e9:.2f} GB", f"{100 * row.top1_agreement:.1f} %"
        lines.append((row.name, row.read, size, *kl, agreement))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print two tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--passages", type=int, help="only the first of the corpus")
    parser.add_argument("--length", type=int, help="tokens of a passage at most")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    reference = OpenModel.open(given.model, dtype="float32")
    texts = passages(reference, given.passages, given.length)
    found = []
    for row in precisions(reference, given.precisions, texts):
        print(f"{row.name}, {row.read}: {row.kl_mean_nats:.2e} nats", file=sys.stderr, flush=True)
        found.append(row)
    del reference
    stored = OpenModel.open(given.model)
    of_caches = list(caches(stored.model, texts))
    if given.json:
        rows = {"precisions": found, "caches": of_caches}
        print(json.dumps({name: [dataclasses.asdict(row) for row in each] for name, each in rows.items()}))
    else:
        print(table(found, "held in"), table(of_caches, "against a bfloat16 cache"), sep="\n\n")


if __name__ == "__main__":
    main()
