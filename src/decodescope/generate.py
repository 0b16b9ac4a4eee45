"""The loop: prefill, choose, decode, stop. Ids in, one Decoded per token out; no text, no clock, no storage.

    decoding = Decoding(model, prompts, samplers, limits)
    while decoding.active:
        decoding.forward()            # ids -> logits of the next position
        for decoded in decoding.choose():   # logits -> one token per active row
            ...

Several prompts decode as one left-padded batch; a row that ends leaves the batch. Between two steps the last
token may be replaced or taken back (`replace`, `rewind`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from decodescope.errors import InputError
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.probe import Tap
from decodescope.sampling.sampler import Choice, Sampler


@dataclass(frozen=True, slots=True)
class Limits:
    """When a row ends, and how it is computed."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    use_cache: bool = True
    prefill_chunk: int = 512  # positions per pass; bounds the memory of a long prompt
    every_logit: bool = False  # also of positions that no token is chosen from


@dataclass(frozen=True, slots=True)
class Decoded:
    """One token of one row: `choice` at `step`, standing at index `position` of the row's sequence."""

    row: int
    step: int
    position: int
    choice: Choice
    ended: Literal["stop", "length"] | None


@dataclass(slots=True)
class _Row:
    index: int
    prompt: list[int]
    sampler: Sampler
    generated: list[int] = field(default_factory=list)
    random_states: list[Tensor] = field(
        default_factory=list
    )  # before each draw of a single row: rewinding repeats it

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.generated]


class Decoding:
    """Sequences being decoded side by side, and the cache they share."""

    def __init__(
        self, model: CausalLM, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], limits: Limits
    ) -> None:
        if not prompts or not all(prompts) or len(prompts) != len(samplers):
            raise ValueError("every row needs a prompt of at least one id, and a sampler")
        self.model, self.limits = model, limits
        self.cache = KVCache(model.config.num_hidden_layers)
        self._all = [_Row(i, list(p), s) for i, (p, s) in enumerate(zip(prompts, samplers, strict=True))]
        self._rows = list(self._all)  # those still decoding
        self._width = max(map(len, prompts))
        self._device = model.lm_head.weight.device
        self._logits: Tensor | None = None  # B V, of the active rows
        self.tap: Tap | None = None  # looks at every pass
        self.on_prefill: Callable[[int, int], None] | None = None  # told (positions done, positions in all)

    @property
    def active(self) -> tuple[int, ...]:
        """The rows still decoding."""
        return tuple(row.index for row in self._rows)

    def cached_tokens(self) -> dict[int, int]:
        """How many tokens of each active row the cache holds, padding left out."""
        return {row.index: max(self.cache.length - self._padding(row), 0) for row in self._rows}

    def forward(self) -> None:
        """Run the model over the tokens it has not seen and keep the logits of the next position."""
        ids, padding = self._unseen()  # B T
        if not self.limits.use_cache:
            self._logits = self._pass(ids, None, padding)
            return
        for part in torch.split(ids, self.limits.prefill_chunk, dim=1):
            self._logits = self._pass(part, self.cache, padding)
            if self.on_prefill and ids.shape[1] > 1:
                self.on_prefill(self.cache.length, self._width)

    def choose(self) -> list[Decoded]:
        """Choose one token for every active row; rows that end leave the batch. Needs `forward` first."""
        if self._logits is None:
            raise ValueError("choose() needs the logits of a forward()")
        decoded = [self._choose(row, logits) for row, logits in zip(self._rows, self._logits, strict=True)]
        self._logits = None
        self.drop({d.row for d in decoded if d.ended})
        return decoded

    def drop(self, ended: set[int]) -> None:
        """Take rows out of the batch."""
        kept = [i for i, row in enumerate(self._rows) if row.index not in ended]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[i] for i in kept]
            if kept:
                self.cache.keep_rows(kept)

    def replace(self, decoded: Decoded, token_id: int) -> Decoded:
        """Put `token_id` where `decoded` stands: the newest token of a row that is still active or has just ended.

        Only for a single sequence. A row that had ended goes on, unless the new token ends it too. Raises
        InputError for an id that the model does not have.
        """
        row = self._single
        if decoded.step != len(row.generated) - 1:
            raise ValueError(f"step {decoded.step} is not the newest of {len(row.generated)}")
        if not 0 <= token_id < self.model.config.vocab_size:
            raise InputError("run.id_outside", id=token_id, rows=self.model.config.vocab_size)
        row.generated[-1] = token_id
        choice = replace(decoded.choice, token_id=token_id, forced=True, drawn=False)
        ended = self._ended(row, token_id)
        self._rows = [] if ended else [row]
        return replace(decoded, choice=choice, ended=ended)

    def rewind(self, step: int) -> None:
        """Forget the tokens from `step` on; the next forward and choice make that step again."""
        row = self._single
        if not 0 <= step <= len(row.generated):
            raise ValueError(f"cannot go back to step {step} of {len(row.generated)}")
        if step < len(row.random_states):  # empty for a greedy row
            row.sampler.restore(row.random_states[step])
        del row.generated[step:], row.random_states[step:]
        # The last remaining token is fed again: its logits are what the step starts from.
        self.cache.truncate(min(self.cache.length, len(row.ids) - 1))
        self._rows, self._logits = [row], None

    def next_pass(self) -> tuple[int, int]:
        """The positions that `forward` is about to compute, of a single sequence: first and behind the last."""
        first = self.cache.length if self.limits.use_cache else 0
        return first, len(self._single.ids)

    def _pass(self, ids: Tensor, cache: KVCache | None, padding: Tensor | None) -> Tensor:
        """Logits [B, V] behind the last position."""
        every = self.limits.every_logit
        logits: Tensor = self.model(ids, cache, padding, every_logit=every, tap=self.tap)  # B T V
        return logits[:, -1]

    @property
    def _single(self) -> _Row:
        if len(self._all) != 1:
            raise ValueError("only a single sequence can be rewound or changed")
        return self._all[0]

    def _choose(self, row: _Row, logits: Tensor) -> Decoded:
        if len(self._all) == 1 and not row.sampler.params.is_greedy:
            row.random_states.append(row.sampler.state())
        choice = row.sampler.choose(logits, row.prompt, row.generated)
        step, position = len(row.generated), len(row.prompt) + len(row.generated)
        row.generated.append(choice.token_id)
        return Decoded(row.index, step, position, choice, self._ended(row, choice.token_id))

    def _ended(self, row: _Row, token_id: int) -> Literal["stop", "length"] | None:
        if token_id in self.limits.stop_ids:
            return "stop"
        return "length" if len(row.generated) >= self.limits.max_new_tokens else None

    def _unseen(self) -> tuple[Tensor, Tensor | None]:
        """Ids the cache does not hold yet [B, T], short prompts padded at the left; the padding [B]."""
        seen, padding = self.cache.length, [self._padding(row) for row in self._rows]
        if seen >= self._width:  # decoding: only generated tokens are new
            ids = [row.generated[seen - self._width :] for row in self._rows]
        else:
            ids = [([0] * pad + row.ids)[seen:] for pad, row in zip(padding, self._rows, strict=True)]
        columns = torch.tensor(padding, device=self._device) if any(padding) else None
        return torch.tensor(ids, device=self._device), columns

    def _padding(self, row: _Row) -> int:
        return self._width - len(row.prompt)


def generate(
    model: CausalLM, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], limits: Limits
) -> Iterator[list[Decoded]]:
    """Decode all prompts to their ends: one list of Decoded, a token per active row, each step."""
    decoding = Decoding(model, prompts, samplers, limits)
    while decoding.active:
        decoding.forward()
        yield decoding.choose()
