"""What goes in and out of the engine: orders, tickets, and the plan that limits them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decodescope.errors import DecodescopeError, InputError
from decodescope.options import RunOptions
from decodescope.text.chat import Prompt
from decodescope.trace.records import End, Step

Deliver = Callable[[Step | End], None]  # called in the engine's thread: every step, then exactly one end


class Busy(DecodescopeError):
    """The queue is full; nothing is wrong with the order, and later there may be room."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a client wants: a prompt, and how to go on from it. Where it is recorded is not the client's to say."""

    prompt: Prompt
    options: RunOptions


@dataclass(slots=True, eq=False)
class Ticket:
    """What a client holds of its order. `reused_tokens` of the prompt were not computed again (0 until known)."""

    run_id: str
    prompt_tokens: int
    reused_tokens: int = 0
    cancelled: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much at once. `cache_bytes` bounds keys and values of all requests together, kept prefixes included.

    Raises InputError for values that cannot be.
    """

    cache_bytes: int
    most_running: int = 8
    most_waiting: int = 64
    prompt_chunk: int = 256  # prompt tokens that others wait for between two of their own

    @property
    def most(self) -> int:
        """Requests that may be there at once, running and waiting."""
        return self.most_running + self.most_waiting

    def __post_init__(self) -> None:
        for name, value in (("--cache-bytes", self.cache_bytes), ("--max-running", self.most_running)):
            if value < 1:
                raise InputError("serve.at_least_one", name=name, value=value)
        if self.most_waiting < 0:
            raise InputError("serve.most_waiting", value=self.most_waiting)
