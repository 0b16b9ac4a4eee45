"""What every inner value should be: transformers' own, taken by hooks, and the equations by hand in float64.

    B rows   T new positions   S cached + new   H query heads   K key/value heads   d head size

`compare` runs our model and transformers' over the same ids, pass by pass, and tells the largest error of each site.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from decodescope.model.config import ModelConfig
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.observe.selection import Place, places
from decodescope.probe import BY_NAME, Attended, Floats, Shown, attention_pattern
from families import VOCABULARY

Values = dict[Place, Tensor]
BOUND = 1e-5  # no position of any value may be further off, in float32
RECONSTRUCTION = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}  # of attention recomputed
LENGTH = 22  # beyond every window of the tiny families
PADDING = (0, 3, 9)  # of the rows of a batch
ENDS = (17, 20, 21, 22)  # of the passes: a prompt, a chunk behind it, two tokens
_STORED = Path(__file__).parent / "parity" / "references.json"


@dataclass(frozen=True)
class Hook:
    """Where transformers shows a value: what goes into a module or what comes out of it."""

    module: str  # inside the layer, for a site of a layer
    side: str

    def __str__(self) -> str:
        return f"{self.side} of `{self.module}`" if self.module else f"{self.side} of the layer"


HOOKS = {
    "embed": Hook("model.embed_tokens", "output"),
    "resid_pre": Hook("", "input"),
    "attn_norm": Hook("input_layernorm", "output"),
    "q": Hook("self_attn.q_proj", "output"),
    "k": Hook("self_attn.k_proj", "output"),
    "v": Hook("self_attn.v_proj", "output"),
    "q_norm": Hook("self_attn.q_norm", "output"),
    "k_norm": Hook("self_attn.k_norm", "output"),
    "z": Hook("self_attn.o_proj", "input"),
    "attn_out": Hook("self_attn.o_proj", "output"),
    "resid_mid": Hook("post_attention_layernorm", "input"),
    "mlp_norm": Hook("post_attention_layernorm", "output"),
    "gate": Hook("mlp.gate_proj", "output"),
    "up": Hook("mlp.up_proj", "output"),
    "act": Hook("mlp.down_proj", "input"),
    "mlp_out": Hook("mlp", "output"),
    "resid_post": Hook("", "output"),
    "final_norm": Hook("model.norm", "output"),
    "logits": Hook("lm_head", "output"),
}
ROTARY, ATTENTION = Hook("model.rotary_emb", "output"), Hook("self_attn", "output")
# How transformers' value of the other sites is had.
DERIVED = {
    "q_rot": "its `apply_rotary_pos_emb`",
    "k_rot": "keys in its cache",
    "pattern": 'attentions of `attn_implementation="eager"`',
}


def random_ids(rows: int = 1, seed: int = 1) -> Tensor:
    """Ids [rows, LENGTH] for the tiny families."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def real_ids(name: str, length: int) -> Tensor:
    """The last ids [1, length] of the first stored prompt and answer of a starter that are as long."""
    cases = json.loads(_STORED.read_text(encoding="utf-8"))["cases"][name]
    sequences = ([*case["prompt_ids"], *case["ids"]] for case in cases)
    return torch.tensor([next(ids for ids in sequences if len(ids) >= length)])[:, -length:]


def _plain(held: Floats) -> Tensor:
    return (held if isinstance(held, Tensor) else held.plain()).clone()


class Everything:
    """A tap that copies all that a model of this configuration has; scores and pattern of every row."""

    def __init__(self, config: ModelConfig) -> None:
        self.values: Values = {}
        self.attended: dict[int | None, tuple[Tensor, Tensor]] = {}  # keys and values, B K S d
        self.fired: list[Place] = []
        self.reconstruction_error = 0.0
        self._places = frozenset(places(config))

    def wants(self, site: str, layer: int | None) -> bool:
        return (site, layer) in self._places

    def receive(self, site: str, layer: int | None, value: Shown) -> None:
        self.fired.append((site, layer))
        self.values[site, layer] = self._rows(site, layer, value) if isinstance(value, Attended) else value.clone()

    def _rows(self, site: str, layer: int | None, value: Attended) -> Tensor:
        self.attended[layer] = (_plain(value.keys), _plain(value.values))
        made = []
        for rows in value.blocks():
            scores = value.scores(rows)
            pattern = attention_pattern(scores)
            self.reconstruction_error = max(self.reconstruction_error, value.error(pattern, rows))
            made.append(pattern if site == "pattern" else scores)
        return torch.cat(made, dim=2)


def reconstruction(
    model: CausalLM, ids: Tensor, ends: Sequence[int], padding: Tensor | None = None
) -> list[float]:
    """How far attention recomputed is from the kernel's, in each of the passes that end there."""
    cache, errors = KVCache(model.config.num_hidden_layers), []
    for start, stop in pairwise((0, *ends)):
        ours = Everything(model.config)
        model(ids[:, start:stop], cache, padding, tap=ours)
        errors.append(ours.reconstruction_error)
    return errors


# --- transformers


@contextmanager
def hooked(reference: transformers.PreTrainedModel) -> Iterator[dict[tuple[Hook, int | None], Any]]:
    """What goes into and comes out of the modules of `HOOKS` while the context lasts."""
    seen: dict[tuple[Hook, int | None], Any] = {}
    handles = []

    def watch(hook: Hook, module: torch.nn.Module, layer: int | None) -> None:
        def keep(_: Any, arguments: Any, output: Any) -> None:
            seen[hook, layer] = arguments[0] if hook.side == "input" else output

        handles.append(module.register_forward_hook(keep))

    for site, hook in HOOKS.items():
        if not BY_NAME[site].per_layer:
            watch(hook, reference.get_submodule(hook.module), None)
            continue
        for layer, block in enumerate(reference.model.layers):
            if hook.module in dict(block.named_modules()):
                watch(hook, block.get_submodule(hook.module), layer)
    watch(ROTARY, reference.model.rotary_emb, None)
    for layer, block in enumerate(reference.model.layers):
        watch(ATTENTION, block.self_attn, layer)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def by_transformers(
    reference: transformers.PreTrainedModel, ids: Tensor, cache: Any, eager_cache: Any, mask: Tensor
) -> Values:
    """Every site that transformers has, of one pass; its eager kernel runs for the pattern alone."""
    start = cache.get_seq_length()
    seen = _passed(reference, "sdpa", ids, cache, mask)
    values = {}
    d = reference.model.layers[0].self_attn.head_dim
    for site, hook in HOOKS.items():
        for (found, layer), value in seen.items():
            if found == hook:
                values[site, layer] = _heads(value, d) if BY_NAME[site].shape.endswith("d") else value
    rotate = sys.modules[type(reference).__module__].apply_rotary_pos_emb
    for layer in range(len(reference.model.layers)):
        q, k = (values.get((f"{name}_norm", layer), values[name, layer]) for name in ("q", "k"))
        values["q_rot", layer] = rotate(q, k, *seen[ROTARY, None])[0]
        values["k_rot", layer] = cache.layers[layer].keys[:, :, start:]
    eager = _passed(reference, "eager", ids, eager_cache, mask)
    return values | {("pattern", i): eager[ATTENTION, i][1] for i in range(len(reference.model.layers))}


def _passed(reference: Any, kernel: str, ids: Tensor, cache: Any, mask: Tensor) -> dict[Any, Any]:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    reference.set_attn_implementation(kernel)
    with torch.inference_mode(), hooked(reference) as seen:
        reference(ids, attention_mask=mask, position_ids=positions, cache=cache)
    return seen


def _heads(value: Tensor, d: int) -> Tensor:
    return value.reshape(*value.shape[:2], -1, d).transpose(1, 2)  # B T (H d) -> B H T d


# --- by hand


@dataclass(frozen=True)
class ByHand:
    """The equations of the papers in float64, each from our own values before it: an error does not travel on."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    frequencies: Tensor  # radians a position, d/2
    factor: float  # yarn's scale of both rotated vectors
    layers: Sequence[int]  # a real model's weights in float64 take a while

    def values(self, ours: Everything, ids: Tensor, padding: Sequence[int]) -> Values:
        """Every site of one pass, B T ... in float64."""
        seen = {place: value.double() for place, value in ours.values.items()}
        last = self.config.num_hidden_layers - 1
        made = {
            ("embed", None): self.weights["model.embed_tokens.weight"][ids].double(),
            ("final_norm", None): self._norm(seen["resid_post", last], "model.norm"),
            ("logits", None): self._linear(seen["final_norm", None], "lm_head"),
        }
        for layer in self.layers:
            of_layer = {site: value for (site, i), value in seen.items() if i == layer}
            before = seen["resid_post", layer - 1] if layer else seen["embed", None]
            parts = (
                self._attention(of_layer, *(each.double() for each in ours.attended[layer]), layer, padding),
                self._stream(of_layer, before, layer),
            )
            made |= {(site, layer): value for part in parts for site, value in part.items()}
        return {place: value for place, value in made.items() if place in seen}

    def _attention(
        self, x: dict[str, Tensor], keys: Tensor, values: Tensor, layer: int, padding: Sequence[int]
    ) -> dict[str, Tensor]:
        name, d = f"model.layers.{layer}.self_attn", self.config.head_dim
        T, S = x["q"].shape[2], keys.shape[2]
        spread = self.config.num_attention_heads // self.config.num_key_value_heads
        keys, values = keys.repeat_interleave(spread, 1), values.repeat_interleave(spread, 1)  # B H S d
        places = torch.stack([(torch.arange(S) - pad).clamp(min=0) for pad in padding])[:, S - T :]  # B T
        scores = torch.einsum("bhtd,bhsd->bhts", x["q_rot"], keys) / d**0.5
        hidden = ~visible(T, S, padding, self.config.window(layer))
        weights = (x["scores"] - x["scores"].amax(-1, keepdim=True)).exp()
        made = {
            **{part: _heads(self._linear(x["attn_norm"], f"{name}.{part}_proj"), d) for part in "qkv"},
            "q_rot": self._rotated(x.get("q_norm", x["q"]), places),
            "k_rot": self._rotated(x.get("k_norm", x["k"]), places),
            "scores": scores.masked_fill(hidden, -torch.inf),
            "pattern": weights / weights.sum(-1, keepdim=True),
            "z": torch.einsum("bhts,bhsd->bhtd", x["pattern"], values),
            "attn_out": self._linear(x["z"].transpose(1, 2).flatten(2), f"{name}.o_proj"),
        }
        return made | {f"{p}_norm": self._norm(x[p], f"{name}.{p}_norm") for p in "qk" if f"{p}_norm" in x}

    def _stream(self, x: dict[str, Tensor], before: Tensor, layer: int) -> dict[str, Tensor]:
        name = f"model.layers.{layer}"
        return {
            "resid_pre": before,
            "attn_norm": self._norm(x["resid_pre"], f"{name}.input_layernorm"),
            "resid_mid": x["resid_pre"] + x["attn_out"],
            "mlp_norm": self._norm(x["resid_mid"], f"{name}.post_attention_layernorm"),
            "gate": self._linear(x["mlp_norm"], f"{name}.mlp.gate_proj"),
            "up": self._linear(x["mlp_norm"], f"{name}.mlp.up_proj"),
            "act": x["gate"] / (1 + (-x["gate"]).exp()) * x["up"],
            "mlp_out": self._linear(x["act"], f"{name}.mlp.down_proj"),
            "resid_post": x["resid_mid"] + x["mlp_out"],
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"].double()
        return weight * x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        # In parts: a vocabulary of float64 rows would be a gigabyte.
        out = torch.cat([x @ rows.double().T for rows in self.weights[f"{name}.weight"].split(2**14)], -1)
        return out + self.weights[f"{name}.bias"].double() if f"{name}.bias" in self.weights else out

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """The pair (i, i + d/2) as a complex number, turned by position times frequency."""
        angles = places[:, None, :, None].double() * self.frequencies.double()  # B 1 T d/2
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.polar(torch.full_like(angles, self.factor), angles)
        return torch.cat((turned.real, turned.imag), -1)


def visible(T: int, S: int, padding: Sequence[int], window: int | None) -> Tensor:
    """B 1 T S: whether a position looks at a column: not ahead, not before its window, not at padding."""
    looks = [
        [[pad <= j <= i and (window is None or i - j < window) for j in range(S)] for i in range(S - T, S)]
        for pad in padding
    ]
    return torch.tensor(looks)[:, None]


# --- compared


@dataclass
class Errors:
    """By place, the largest error of a position over all passes, from each kind of reference."""

    transformers: dict[Place, float] = field(default_factory=dict)
    by_hand: dict[Place, float] = field(default_factory=dict)
    reconstruction: float = 0.0

    def join(self, other: "Errors") -> None:
        """The larger of both."""
        for mine, theirs in ((self.transformers, other.transformers), (self.by_hand, other.by_hand)):
            for place, error in theirs.items():
                mine[place] = max(mine.get(place, 0.0), error)
        self.reconstruction = max(self.reconstruction, other.reconstruction)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest ||a - b|| / ||b|| of a position; infinite where shapes or masks differ."""
    if found.shape != expected.shape or not torch.equal(found.isinf(), expected.isinf()):
        return torch.inf
    a, b = (each.double().masked_fill(each.isinf(), 0).movedim(-2, 1).flatten(2) for each in (found, expected))
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def without_padding(value: Tensor, padding: Sequence[int], T: int, S: int) -> list[Tensor]:
    """Each row of the batch without the positions that are no tokens."""
    first = [max(pad - (S - T), 0) for pad in padding]
    return [value[row : row + 1, ..., start:, :] for row, start in enumerate(first)]


def largest(found: Values, expected: Values, padding: Sequence[int], S: int) -> dict[Place, float]:
    """The error of every value that is expected."""
    T = found["embed", None].shape[1]

    def rows(value: Tensor) -> list[Tensor]:
        return without_padding(value, padding, T, S)

    return {
        place: max(error(a, b) for a, b in zip(rows(found[place]), rows(value), strict=True))
        for place, value in expected.items()
    }


def of_sites(errors: Mapping[Place, float]) -> dict[str, float]:
    """The largest error of each site over the layers."""
    by_site: dict[str, float] = defaultdict(float)
    for (site, _), each in errors.items():
        by_site[site] = max(by_site[site], each)
    return dict(by_site)


def _by_hand(model: CausalLM, reference: transformers.PreTrainedModel, layers: Sequence[int] | None) -> ByHand:
    rotary = reference.model.rotary_emb
    every = range(model.config.num_hidden_layers) if layers is None else layers
    return ByHand(model.config, model.state_dict(), rotary.inv_freq, rotary.attention_scaling, every)


def with_weights_of(model: CausalLM) -> transformers.PreTrainedModel:
    """transformers' model over the very tensors of ours: a real one twice would not fit everywhere.

    That the weights were read rightly is for tests/parity/test_starter_references.py to say.
    """
    ours = model.config
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    keys = {name: getattr(ours, name) for name in names.split()}
    assert ours.rope.kind == "default" and not ours.windows
    rope = {"rope_type": "default", "rope_theta": ours.rope.theta}
    config = getattr(transformers, ours.architecture.replace("ForCausalLM", "Config"))(
        **keys, rope_parameters=rope
    )
    with torch.device("meta"):
        reference = getattr(transformers, ours.architecture)(config).eval()
    reference.load_state_dict(model.state_dict(), assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)  # its frequencies are no weights
    return reference


def compare(
    model: CausalLM,
    reference: transformers.PreTrainedModel,
    ids: Tensor,
    ends: Sequence[int] = ENDS,
    padding: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
) -> Errors:
    """Run both over ids [B, S], a pass up to each of `ends` behind the cache of those before, and compare.

    `padding` counts the columns at each row's left that are no tokens; `layers` are those computed by hand.
    """
    cache, theirs, eager = KVCache(model.config.num_hidden_layers), *(transformers.DynamicCache() for _ in "12")
    hand = _by_hand(model, reference, layers)
    columns = torch.tensor(padding) if any(padding) else None
    errors = Errors()
    for start, stop in pairwise((0, *ends)):
        new, mask = ids[:, start:stop], (torch.arange(stop) >= torch.tensor(padding)[:, None]).long()
        ours = Everything(model.config)
        model(new, cache, columns, every_logit=True, tap=ours)
        expected = by_transformers(reference, new, theirs, eager, mask)
        errors.join(
            Errors(
                largest(ours.values, expected, padding, stop),
                largest(ours.values, hand.values(ours, new, padding), padding, stop),
                ours.reconstruction_error,
            )
        )
    return errors
