"""A conversation: turn after turn through the chat template, and what the cache spares each of them.

The sequence of a turn begins with that of the turn before, as long as template and tokenizer write the history as
it was generated; that much of the cache is taken over, and only the rest is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress
from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.text.messages import Message, with_system
from decodescope.trace.records import FinishReason, Step


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a turn's sequence leaves the cached one, before that one's end: `lost_tokens` of it are of no use."""

    position: int
    held_text: str
    wanted_text: str
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn and what it cost. `turn` counts those that were made, taken back or not.

    `prompt_tokens` are `reused_tokens` from the cache and `read_tokens` new ones; `cache_bytes` are those in use
    after the turn, `cache_growth_bytes` what they are more than after the turn before in the conversation.
    """

    turn: int
    user: str
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    parting: Parting | None
    prefill_s: float
    new_tokens: int
    decode_tokens_per_s: float | None  # without the first token, None where there is no other
    seconds_per_token: float | None  # of the same
    cache_bytes: int
    cache_growth_bytes: int
    trace: str | None


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The first and the last turn that stand, side by side, and the prompt tokens of all that do."""

    first: Turn
    last: Turn
    prompt_tokens: int
    reused_tokens: int


class Conversation:
    """Turn after turn: `ask`, decode what it returns, `answered`; `undo` takes a turn back."""

    def __init__(self, session: Session, options: RunOptions, system: str | None = None) -> None:
        """With `options.save` every turn has a numbered run folder in that one."""
        self._session = session
        self._options = options
        self._system = system
        self._asked = ""
        self._made = 0
        self._held: Sequence[int] = ()  # the ids that the last turn's cache stands for
        self._parting: Parting | None = None
        self.turns: list[Turn] = []  # those that stand

    def ask(self, text: str, progress: Progress | None = None) -> LiveRun:
        """The run of the next turn, not yet begun. Raises InputError, also where the context is full."""
        prompt = self._session.chat([*self._messages(), {"role": "user", "content": text}])
        save = None if self._options.save is None else Path(self._options.save) / f"{self._made:04d}"
        # The first turn reads all of its prompt, whatever ran in this session before.
        options = replace(self._options, save=save, reuse_cache=self._made > 0)
        live = self._session.start([prompt], options, progress)
        self._asked, self._parting = text, self._where_they_part(prompt.ids, live.reused_tokens)
        return live

    def answered(self, live: LiveRun) -> Turn:
        """The turn that a run which has ended makes, now part of the conversation. Raises ValueError otherwise."""
        turn = self._turn(live)
        self.turns.append(turn)
        self._made, self._held = self._made + 1, live.past().ids
        return turn

    @property
    def begun(self) -> bool:
        """Whether a turn was made, taken back or not."""
        return self._made > 0

    def undo(self) -> Turn | None:
        """Take the last turn back; None where there is none."""
        if not self.turns:
            return None
        self._held = ()  # what follows parts from it because the reader wanted that
        return self.turns.pop()

    @property
    def slowdown(self) -> Slowdown | None:
        """How the last turn stands beside the first; None with fewer than two."""
        if len(self.turns) < 2:
            return None
        prompt = sum(turn.prompt_tokens for turn in self.turns)
        return Slowdown(self.turns[0], self.turns[-1], prompt, sum(turn.reused_tokens for turn in self.turns))

    def _messages(self) -> list[Message]:
        told: list[Message] = []
        for turn in self.turns:
            told += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.text}]
        return with_system(told, self._system)

    def _where_they_part(self, ids: Sequence[int], reused: int) -> Parting | None:
        if reused >= len(self._held) or self._held[reused] == ids[reused]:
            return None
        spell = self._session.tokenizer.token_text
        held, wanted = spell(self._held[reused]), spell(ids[reused])
        return Parting(reused, held, wanted, len(self._held) - reused)

    def _turn(self, live: LiveRun) -> Turn:
        path, end, reused = live.traces[0].path(), live.traces[0].end, live.reused_tokens
        if end is None or not path:
            raise ValueError("a turn needs a run that has ended and has a token")
        cache_bytes = path[-1].kv.used_bytes
        return Turn(
            turn=self._made,
            user=self._asked,
            text=end.text,
            finish_reason=end.finish_reason,
            prompt_tokens=end.prompt_tokens,
            reused_tokens=reused,
            read_tokens=end.prompt_tokens - reused,
            parting=self._parting,
            prefill_s=path[0].timing.forward_s,
            new_tokens=end.new_tokens,
            decode_tokens_per_s=end.decode_tokens_per_s,
            seconds_per_token=_seconds_per_token(path),
            cache_bytes=cache_bytes,
            cache_growth_bytes=cache_bytes - (self.turns[-1].cache_bytes if self.turns else 0),
            trace=end.trace,
        )


def _seconds_per_token(path: Sequence[Step]) -> float | None:
    seconds = [step.timing.total_s for step in path[1:]]
    return sum(seconds) / len(seconds) if seconds else None
