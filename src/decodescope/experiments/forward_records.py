"""What a walk through the forward pass leaves behind: frozen records, units in the field names."""

from dataclasses import dataclass

from decodescope.analysis.departure import Comparison, Departure
from decodescope.analysis.residual import StreamChange
from decodescope.experiments.rope_records import RopeReport
from decodescope.observe.kept import Dropped
from decodescope.trace.records import FinishReason, PromptToken
from decodescope.trace.site_records import LayerCost, NonFinite, SiteSummary
from decodescope.trace.tensors import SavedTensor


@dataclass(frozen=True, slots=True)
class Pass:
    """The passes of one step, over the positions `first` to `last`, and the token chosen after them.

    The token is None where none could be chosen.
    """

    step: int
    first: int
    last: int
    token_id: int | None
    text: str | None
    prob: float | None


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """The first and last numbers of one row of a tensor; `index` is head and position, or the position alone."""

    index: tuple[int, ...]
    head: tuple[float, ...]
    tail: tuple[float, ...]  # empty where `head` holds the whole row


@dataclass(frozen=True, slots=True)
class Edges:
    """The corners of one inner value: its first and last row, of the first and the last head."""

    step: int
    layer: int | None
    site: str
    rows: tuple[EdgeRow, ...]


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """One prompt's way through the model, as far as it has come; what was chosen to be seen, in the order of
    computation.

    `layers` and `growth` are those of every layer. `kept` lies in the run folder `trace`, within `budget_bytes`.
    `reconstruction_error` is the worst of all recomputed patterns: ||a - b|| / ||b|| against the layer's own z.
    """

    model: str
    source: str
    revision: str | None
    sha256: str | None
    architecture: str
    dtype: str
    device: str
    attention: str
    notes: tuple[str, ...]  # things the reader should know: catalogue keys
    ids: tuple[int, ...]
    tokens: tuple[PromptToken, ...]
    steps: tuple[Pass, ...]
    sites: tuple[SiteSummary, ...]
    values: tuple[Edges, ...]
    first_nonfinite: NonFinite | None
    layers: tuple[LayerCost, ...]
    growth: tuple[StreamChange, ...]
    reconstruction_error: float | None
    kept: tuple[SavedTensor, ...]
    kept_bytes: int
    budget_bytes: int
    dropped: tuple[Dropped, ...]
    against: Comparison | None
    departure: Departure | None
    rope: RopeReport | None
    finish_reason: FinishReason | None
    trace: str | None

    def token_at(self, position: int) -> str:
        """The text of the token that was fed at a position."""
        fed = [token.text for token in self.tokens] + [each.text or "" for each in self.steps]
        return fed[position]
