"""What is served: the engine with its model, its metrics, and what requests do by default."""

from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING

from decodescope.monitor.metrics import Metrics
from decodescope.serving.engine import Engine

if TYPE_CHECKING:
    from decodescope.serving.archive import Archive
    from decodescope.session import Session


@dataclass(frozen=True, slots=True)
class Served:
    """`guards` are the rules of requests that bring none of their own."""

    engine: Engine
    metrics: Metrics
    guards: tuple[str, ...] = ()
    started_at: int = field(default_factory=lambda: int(time()))  # Unix time in seconds

    @property
    def session(self) -> "Session":
        """The open model."""
        return self.engine.session

    @property
    def archive(self) -> "Archive | None":
        """Where runs are recorded, if they are."""
        return self.engine.archive

    @property
    def model_name(self) -> str:
        """As the user named the model."""
        return self.session.files.name
