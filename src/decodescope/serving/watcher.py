"""Watcher: who wants to be told what the engine does."""

from typing import Protocol, runtime_checkable

from decodescope.trace.records import Step, Trace


@runtime_checkable
class Watcher(Protocol):
    """Told in the engine's thread between two passes: must be quick, and never raise."""

    def joined(self, run_id: str, prompt_tokens: int, reused_tokens: int, waited_s: float) -> None:
        """A request leaves the queue; so many of its prompt's tokens need not be computed."""

    def stepped(self, run_id: str, step: Step, seconds: float) -> None:
        """A token: `seconds` since the request came for the first, since the token before for the others."""

    def ended(self, run_id: str, trace: Trace, seconds: float, reason: str) -> None:
        """A request that had joined is over, `seconds` after it came: stop, length, abort (its client left or the
        server closes), error or nonfinite."""

    def refused(self, reason: str) -> None:
        """A request never joined: queue_full, too_long, too_large, invalid, failed, abandoned while it waited."""
