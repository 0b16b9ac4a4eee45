"""The loop: prefill, choose, decode, stop. Ids in, one Decoded per token out; no text, no clock, no storage.

    while decoding.active:
        decoding.forward()            # ids -> logits of the next position
        for decoded in decoding.choose():   # logits -> one token per active row
            ...

Several prompts decode as one left-padded batch; equal ones are read once and share that. A row that ends leaves
it. Tokens may be laid down in advance (`force`); the last of a single row may be replaced or taken back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from decodescope.errors import InputError
from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import helpers_alone
from decodescope.model.kernels.compiled import MOST_ROWS
from decodescope.model.kv_cache import KVCache
from decodescope.model.linear import by_kernels
from decodescope.model.ragged import Cache
from decodescope.probe import Tap
from decodescope.sampling.sampler import Choice, Sampler
from decodescope.sequences import common_length


@dataclass(frozen=True, slots=True)
class Limits:
    """When a row ends, and how it is computed."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    use_cache: bool = True
    prefill_chunk: int = 512  # positions per pass; bounds the memory of a long prompt
    every_logit: bool = False  # also of positions that no token is chosen from
    cache_dtype: torch.dtype | None = None  # of keys and values; None: as they come


@dataclass(frozen=True, slots=True)
class Past:
    """What is there before the first step: tokens of an answer, and a cache with the ids that it holds.

    The cache is used for as long as its ids are those of the sequence, and taken over: pass a fork to keep it.
    """

    generated: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    cache: KVCache | None = None


NOTHING = Past()


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
    generated: list[int]
    draws: list[int]  # that the sampler had made before each token: rewinding repeats them
    forced: list[int] = field(default_factory=list)  # the next tokens, whatever the sampler says

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.generated]


class Decoding:
    """Sequences being decoded side by side, and the cache they share."""

    def __init__(
        self,
        model: CausalLM,
        prompts: Sequence[Sequence[int]],
        samplers: Sequence[Sampler],
        limits: Limits,
        past: Past = NOTHING,
    ) -> None:
        if not prompts or not all(prompts) or len(prompts) != len(samplers):
            raise ValueError("every row needs a prompt of at least one id, and a sampler")
        self.model, self.limits = model, limits
        self._started = len(past.generated)
        made = list(past.generated)
        self._all = [
            _Row(i, list(prompt), sampler, list(made), [sampler.draws] * len(made))
            for i, (prompt, sampler) in enumerate(zip(prompts, samplers, strict=True))
        ]
        self._rows = list(self._all)  # those still decoding
        self._width = max(map(len, prompts))
        self._joint = all(row.prompt == self._rows[0].prompt for row in self._rows)  # until they part
        self._trunk = NOTHING  # what a batch read as one row
        self.cache = self._usable(past)
        self._device, self._by_kernels = model.device, by_kernels(model)
        self._logits: Tensor | None = None  # B V, of the active rows
        self.tap: Tap | None = None  # looks at every pass
        self.on_prefill: Callable[[int, int], None] | None = None  # told (positions done, positions in all)

    @property
    def active(self) -> tuple[int, ...]:
        """The rows still decoding."""
        return tuple(row.index for row in self._rows)

    def cached_tokens(self) -> dict[int, int]:
        """How many tokens of each active row the cache holds, padding left out, what rows share included."""
        return {row.index: max(self.cache.length - self._padding(row), 0) for row in self._rows}

    def forward(self) -> None:
        """Run the model over the tokens it has not seen and keep the logits of the next position."""
        ids, padding = self._unseen()  # B T
        cache, end = self.cache if self.limits.use_cache else None, self.cache.length + ids.shape[1]
        for part in torch.split(ids, self.limits.prefill_chunk, dim=1) if cache else [ids]:
            logits = self.compute(part, cache, padding)
            if cache and self.on_prefill and ids.shape[1] > 1:
                self.on_prefill(cache.length, end)
        if self._joint and len(self._rows) > 1:
            if cache:
                self._trunk = Past((), tuple(self._rows[0].ids), cache)
            self.cache = self.cache.fork()  # each row goes on behind the past of all
            logits = logits.expand(len(self._rows), -1)
        self._joint, self._logits = False, logits

    def read_chunk(self) -> bool:
        """Read a chunk of a single sequence ahead of `forward`; False where that has no more than one to read."""
        first, end = self.next_pass()
        if end - first <= self.limits.prefill_chunk:
            return False
        ids, _ = self._unseen()
        self.compute(ids[:, : self.limits.prefill_chunk], self.cache, None)
        return True

    def take(self, logits: Tensor) -> None:
        """Go on from logits [B, V] that were computed elsewhere, with the keys and values in `cache`."""
        self._joint, self._logits = False, logits

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

    def force(self, row: int, token_ids: Sequence[int]) -> None:
        """Lay down the next tokens of a row; the sampler's choices there are made and overruled.

        Raises InputError for an id that the model does not have.
        """
        for token_id in token_ids:
            self._check_id(token_id)
        self._all[row].forced.extend(token_ids)

    def temperature(self, row: int) -> float:
        """The temperature in force for a row's next token."""
        return self._all[row].sampler.params.temperature

    def temper(self, row: int, temperature: float) -> None:
        """Go on with another temperature."""
        sampler = self._all[row].sampler
        sampler.params = replace(sampler.params, temperature=temperature)

    def past(self) -> Past:
        """What a single sequence has come to, for another decoding to go on from; of a batch what all share."""
        if len(self._all) != 1 or not self.limits.use_cache:
            return self._trunk
        row = self._all[0]
        return Past(tuple(row.generated), tuple(row.ids[: self.cache.length]), self.cache)

    def replace(self, decoded: Decoded, token_id: int) -> Decoded:
        """Put `token_id` where `decoded` stands: the newest token of a row that is still active or has just ended.

        Only for a single sequence. A row that had ended goes on, unless the new token ends it too. Raises
        InputError for an id that the model does not have.
        """
        row = self._single
        if decoded.step != len(row.generated) - 1:
            raise ValueError(f"step {decoded.step} is not the newest of {len(row.generated)}")
        self._check_id(token_id)
        row.generated[-1] = token_id
        choice = _overruled(decoded.choice, token_id)
        ended = self._ended(row, token_id)
        self._rows = [] if ended else [row]
        return replace(decoded, choice=choice, ended=ended)

    def rewind(self, step: int) -> None:
        """Forget the tokens from `step` on; the next forward and choice make that step again."""
        row = self._single
        if not self._started <= step <= len(row.generated):
            raise ValueError(f"cannot go back to step {step} of {len(row.generated)}")
        if step < len(row.draws):
            row.sampler.draws = row.draws[step]
        del row.generated[step:], row.draws[step:], row.forced[:]
        # The last remaining token is fed again: its logits are what the step starts from.
        self.cache.truncate(min(self.cache.length, len(row.ids) - 1))
        self._rows, self._logits = [row], None

    @property
    def last_id(self) -> int:
        """The newest token of a single sequence."""
        row = self._single
        return (row.generated or row.prompt)[-1]

    def next_pass(self) -> tuple[int, int]:
        """The positions that `forward` is about to compute, of a single sequence: first and behind the last."""
        first, row = self.cache.length if self.limits.use_cache else 0, self._single
        return first, len(row.prompt) + len(row.generated)

    def compute(self, ids: Tensor, cache: Cache | None, padding: Tensor | None) -> Tensor:
        """Logits [B, V] behind the last position of ids [B, T], which continue what a cache holds."""
        every, few = self.limits.every_logit, ids.shape[1] == 1 and ids.shape[0] <= MOST_ROWS
        with helpers_alone() if few and self._by_kernels else nullcontext():
            logits: Tensor = self.model(ids, cache, padding, every_logit=every, tap=self.tap)  # B T V
        return logits[:, -1]

    @property
    def _single(self) -> _Row:
        if len(self._all) != 1:
            raise ValueError("only a single sequence can be rewound or changed")
        return self._all[0]

    def _choose(self, row: _Row, logits: Tensor) -> Decoded:
        row.draws.append(row.sampler.draws)
        choice = row.sampler.choose(logits, row.prompt, row.generated)
        if row.forced:
            choice = _overruled(choice, row.forced.pop(0))
        step, position = len(row.generated), len(row.prompt) + len(row.generated)
        row.generated.append(choice.token_id)
        return Decoded(row.index, step, position, choice, self._ended(row, choice.token_id))

    def _ended(self, row: _Row, token_id: int) -> Literal["stop", "length"] | None:
        if token_id in self.limits.stop_ids:
            return "stop"
        return "length" if len(row.generated) >= self.limits.max_new_tokens else None

    def _unseen(self) -> tuple[Tensor, Tensor | None]:
        """Ids the cache does not hold yet [B, T], short prompts padded at the left; the padding [B].

        One row stands for all as long as they are the same.
        """
        rows = self._rows[:1] if self._joint else self._rows
        seen, padding = self.cache.length, [self._padding(row) for row in rows]
        if seen >= self._width:  # decoding: only generated tokens are new
            ids = [row.generated[seen - self._width :] for row in rows]
        else:
            ids = [([0] * pad + row.ids)[seen:] for pad, row in zip(padding, rows, strict=True)]
        columns = torch.tensor(padding, device=self._device) if any(padding) else None
        return torch.tensor(ids, device=self._device), columns

    def _usable(self, past: Past) -> KVCache:
        """The past's cache as far as it holds our sequence, but for the last token: its logits are wanted."""
        if past.cache is None or not self._joint or not self.limits.use_cache:
            return KVCache(self.model.config.num_hidden_layers, self.limits.cache_dtype)
        ids = self._rows[0].ids
        past.cache.truncate(common_length(past.ids, ids[:-1]))
        return past.cache

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.model.config.vocab_size:
            raise InputError("run.id_outside", id=token_id, rows=self.model.config.vocab_size)

    def _padding(self, row: _Row) -> int:
        return self._width - len(row.prompt)


def _overruled(choice: Choice, token_id: int) -> Choice:
    return replace(choice, token_id=token_id, forced=True, drawn=False)


def generate(
    model: CausalLM, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], limits: Limits
) -> Iterator[list[Decoded]]:
    """Decode all prompts to their ends: one list of Decoded, a token per active row, each step."""
    decoding = Decoding(model, prompts, samplers, limits)
    while decoding.active:
        decoding.forward()
        yield decoding.choose()
