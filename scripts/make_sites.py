"""Write docs/sites.md: every inner value, what it is, and how far it is from its references, measured now.

`--check` writes nothing: it measures the tiny families again and exits 1 when a value is too far off or the page
is out of date, its measured figures (of another machine, perhaps) left aside.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import torch
import transformers
from torch import Tensor

from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.models import find_model
from decodescope.observe.selection import places
from decodescope.probe import SITES, Site

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "sites.md"
sys.path.insert(0, str(ROOT / "tests"))
families: Any = import_module("families")
references: Any = import_module("site_references")  # what the parity tests compare with, and how

_FIGURE = re.compile(r"(?<=\| )(?:0|\d\.\de[+-]\d\d)(?= \|)")  # a measured cell of a table
_MEANING = {
    "embed": "the token's row of the embedding",
    "resid_pre": "the residual stream before the layer",
    "attn_norm": "the stream, normed for attention",
    "q": "queries, with bias where the family has one",
    "k": "keys, with bias where the family has one",
    "v": "values, with bias where the family has one",
    "q_norm": "queries, each head normed",
    "k_norm": "keys, each head normed",
    "q_rot": "queries, turned by their position",
    "k_rot": "keys, turned by their position: what the cache holds",
    "scores": "q·k / √d; -inf where a row may not look",
    "pattern": "softmax of the scores: what a row gives to each column",
    "z": "what each head reads: pattern times values",
    "attn_out": "what attention adds to the stream",
    "resid_mid": "the stream between attention and MLP",
    "mlp_norm": "the stream, normed for the MLP",
    "gate": "the MLP's gate before SiLU",
    "up": "the MLP's other half",
    "act": "silu(gate) times up",
    "mlp_out": "what the MLP adds to the stream",
    "resid_post": "the residual stream behind the layer",
    "final_norm": "the stream behind the last layer, normed",
    "logits": "the score of every token of the vocabulary",
}
_PAGE = """\
# Inner values

Written by `scripts/make_sites.py`, which measures what it says; `make lint` checks that the page is true.

A forward pass shows the values below under their own names, in this order: `embed`, then those of every layer from
the first to the last (`layers.0.resid_pre`), then `final_norm` and `logits`. Looking at them changes no bit of
the run.

    B rows            H query heads          d size of a head
    T new positions   K key/value heads      F width of the MLP
    S cached + new    D hidden size          V rows of the vocabulary

- `final_norm` and `logits` are there for the last position alone, unless every logit was asked for.
- `resid_pre` of layer i + 1 is `resid_post` of layer i, and that of layer 0 is `embed`.
- `scores` and `pattern` are *recomputed*: the run itself keeps its fused kernel, which never holds them. They are
  made again from the run's own `q_rot` and cached keys, in float32 whatever the run's dtype, head by head as the
  kernel does.
- Keys and values of earlier positions are those of the steps that made them.

{sites}

## How they were checked

An error is the largest ‖a - b‖ / ‖b‖ of a single position, over all layers: a large row hides no small one. All
are of float32, and none may reach 1e-5; 0 means the same to the last bit.

- **transformers** {transformers}: the same weights, its own value of the same pass, taken by a forward hook or as
  the table says.
- **by hand**: the equation of the paper in float64, made of our own values before it, so that no error travels on.
{families}
- **starter**: the real model, a prompt and a token behind it; by hand in its first, middle and last layer.

{checks}

Attention recomputed is also compared with what the fused kernel gave: pattern times values against `z`, the
largest error of a position.

{attention}
"""


@dataclass(slots=True)
class Measured:
    """Errors of the tiny families and the starter; of attention by dtype; the architectures that have a site."""

    families: Any = field(default_factory=references.Errors)
    starter: Any = field(default_factory=references.Errors)
    attention: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    owners: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def main() -> int:
    """Write or check the page; the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = Measured()
    measure_families(found)
    if "--check" not in sys.argv[1:]:
        measure_starter(found)
        FILE.write_text(page(found), encoding="utf-8")
        return 0
    fresh, stored = page(found), FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    faults = [f"too far off: {line}" for text in (fresh, stored) for line in too_far_off(text)]
    if _FIGURE.sub("", fresh) != _FIGURE.sub("", stored):
        faults.append("out of date: docs/sites.md")
    print("".join(f"{fault}\n" for fault in faults), file=sys.stderr, end="")
    return 1 if faults else 0


def too_far_off(text: str) -> Iterator[str]:
    """The lines that hold a figure beyond its bound: that of a dtype where the line names one."""
    for line in text.splitlines():
        dtype = next((dtype for dtype in references.RECONSTRUCTION if f"`{dtype}`" in line), "float32")
        if any(float(figure) >= references.RECONSTRUCTION[dtype] for figure in _FIGURE.findall(line)):
            yield line


def measure_families(found: Measured) -> None:
    """Every tiny family: alone, and as a left-padded batch."""
    alone, batch = references.random_ids(), references.random_ids(len(references.PADDING))
    with TemporaryDirectory() as scratch:
        for family in families.FAMILIES:
            folder = Path(scratch) / family.name
            reference, model = family.save(folder), load_model(folder)[0]
            found.families.join(references.compare(model, reference, alone))
            found.families.join(references.compare(model, reference, batch, padding=references.PADDING))
            for site, _ in places(model.config):
                found.owners[site].add(model.config.architecture.removesuffix("ForCausalLM"))
            for dtype in references.RECONSTRUCTION:
                _measure_attention(found, 0, load_model(folder, dtype)[0], alone, references.ENDS)


def measure_starter(found: Measured) -> None:
    """The starter: a prompt and a token; by hand in three layers, for its weights in float64 take a while."""
    path, ids, ends = find_model("starter", download=False).path, references.real_ids("starter", 13), (12, 13)
    for dtype in references.RECONSTRUCTION:
        model = load_model(path, dtype)[0]
        _measure_attention(found, 1, model, ids, ends)
        if dtype == "float32":
            last = model.config.num_hidden_layers - 1
            reference, layers = references.with_weights_of(model), (0, last // 2, last)
            found.starter.join(references.compare(model, reference, ids, ends, layers=layers))
            del reference
        del model  # before the next one comes


def _measure_attention(found: Measured, column: int, model: CausalLM, ids: Tensor, ends: Sequence[int]) -> None:
    largest = max(references.reconstruction(model, ids, ends))
    errors = found.attention[str(model.dtype).removeprefix("torch.")]
    errors[column] = max(errors[column], largest)


def page(found: Measured) -> str:
    """The whole page."""
    return _PAGE.format(
        sites=_table("site", "shape", "what it is", "of", "in")(_described(site, found) for site in SITES),
        checks=_table("site", "transformers' value", "families", "starter", "by hand: families", "starter")(
            _checked(site, found) for site in SITES
        ),
        attention=_table("dtype", "may not reach", "families", "starter")(
            (f"`{dtype}`", f"{references.RECONSTRUCTION[dtype]:.0e}", *map(_figure, errors))
            for dtype, errors in found.attention.items()
        ),
        transformers=transformers.__version__.split(".")[0],
        families=_of_families(),
    )


def _of_families() -> str:
    names = ", ".join(family.name for family in families.FAMILIES)
    many, rows = len(families.FAMILIES), len(references.PADDING)
    sentence = (
        f"- **families**: {many} tiny random models ({names}). Each reads a prompt, a chunk behind it and two"
        f" tokens behind the cache, once alone and once in a left-padded batch of {rows}."
    )
    return fill(sentence, 115, subsequent_indent="  ", break_on_hyphens=False)


def _table(*head: str) -> Callable[[Iterable[Sequence[str]]], str]:
    def rows(cells: Iterable[Sequence[str]]) -> str:
        lines = (head, ["---"] * len(head), *cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    return rows


def _described(site: Site, found: Measured) -> tuple[str, ...]:
    owners = found.owners[site.name]
    everywhere = owners == set().union(*found.owners.values())
    recomputed = "; recomputed" if site.recomputed else ""
    return (
        f"`{site.name}`",
        site.shape,
        _MEANING[site.name] + recomputed,
        "each layer" if site.per_layer else "the model",
        "all families" if everywhere else ", ".join(sorted(owners)),
    )


def _checked(site: Site, found: Measured) -> tuple[str, ...]:
    theirs = references.HOOKS.get(site.name) or references.DERIVED.get(site.name)
    figures = [
        _figure(references.of_sites(errors).get(site.name, 0.0)) if there else ""
        for source in (found.families, found.starter)
        for errors, there in ((source.transformers, theirs), (source.by_hand, True))
    ]
    if "Qwen2" not in found.owners[site.name]:  # what the starter is
        figures[2] = figures[3] = ""
    return f"`{site.name}`", str(theirs or "none"), figures[0], figures[2], figures[1], figures[3]


def _figure(value: float) -> str:
    return f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    raise SystemExit(main())
