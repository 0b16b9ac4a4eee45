"""Who looks at whom: the attention of one run, for the layers, heads and rows asked for.

The run keeps its fused kernel and so its very tokens; the rows are recomputed beside it from its own q_rot and
cached keys (`probe.Attended`), and how well is measured against the layer's own output.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from decodescope.analysis.attention import kv_head_of
from decodescope.errors import InputError
from decodescope.experiments.attention_reading import Asked, AttentionReading, LayerReading
from decodescope.experiments.attention_records import (
    AttentionReport,
    Grid,
    HeadAttention,
    LayerError,
    SequenceToken,
    spans_of,
)
from decodescope.experiments.positions import select_positions
from decodescope.model.checkpoint import Progress
from decodescope.model.config import ModelConfig
from decodescope.observe.recording import Watch
from decodescope.observe.selection import select_layers, select_numbers
from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.text.chat import Prompt
from decodescope.trace.records import Run, Step

_SAID_ELSEWHERE = {"note.observed"}  # attention tells no times

MOST_WEIGHTS = 2**22  # that are kept as rows: some 100 MB as a document
_BINS, _SMALL_BINS = 256, 128  # of a head on its own, and of one among many


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What to look at, in words such as `3`, `-1`, `0-5`; no words for layers or heads mean all of them.

    `positions` are rows in the prompt, its last one by default. Each of the `steps` tokens to generate adds the
    row that led to it, but for the first: that is the prompt's last. Raises InputError for what cannot be.
    """

    layers: Sequence[str] = ()
    heads: Sequence[str] = ()
    positions: Sequence[str] = ()
    steps: int = 0
    keep_rows: bool = True

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InputError("steps", value=self.steps)


@dataclass(frozen=True, slots=True)
class Attention:
    """What was found: the report, and the same weights as a grid to be drawn."""

    report: AttentionReport
    grid: Grid


def study_attention(
    session: Session, prompt: Prompt, plan: AttentionPlan, progress: Progress | None = None
) -> Attention:
    """Decode the plan's tokens, reading the patterns on the way.

    Raises InputError for layers, heads or positions that the model or the prompt lacks and for more rows than can
    be kept, before any work; later what a run raises.
    """
    config, passes = session.model.config, max(plan.steps, 1)
    room = max(config.max_position_embeddings - len(prompt.ids), 1)
    reading = AttentionReading(_asked(config, prompt, plan, min(passes, room)), prompt.ids)
    steps: list[Step] = []
    with session.watching(Watch(beside=(reading,))):
        live = session.start([prompt], RunOptions(max_new_tokens=passes, candidates=1), progress)
        for _, step in live.steps():
            steps.append(step)
            reading.next_step(step.token_id)
    run = live.traces[0].run
    tokens = _tokens(run, steps[: plan.steps])
    cached = len(prompt.tokens) + len(steps) - 1
    return Attention(_report(config, run, tokens, reading), _grid(reading, cached))


def _asked(config: ModelConfig, prompt: Prompt, plan: AttentionPlan, passes: int) -> Asked:
    layers = tuple(sorted(select_layers(config, plan.layers)))
    query_heads = config.num_attention_heads
    heads = tuple(sorted(select_numbers(plan.heads or ("all",), query_heads, "attention.no_head", "head")))
    length = len(prompt.tokens)
    rows = (*sorted(select_positions(plan.positions, length)), *range(length, length + passes - 1))
    bins = _BINS if len(layers) * len(heads) == 1 else _SMALL_BINS
    asked = Asked(layers, heads, rows, bins, plan.keep_rows)
    if plan.keep_rows and asked.weights > MOST_WEIGHTS:
        raise InputError("attention.too_many", weights=asked.weights, most=MOST_WEIGHTS)
    return asked


def _tokens(run: Run, steps: list[Step]) -> tuple[SequenceToken, ...]:
    prompt = (SequenceToken(i, token.token_id, token.text, None) for i, token in enumerate(run.prompt_tokens))
    new = (SequenceToken(step.position, step.token_id, step.text, step.step) for step in steps)
    return (*prompt, *new)


def _report(
    config: ModelConfig, run: Run, tokens: tuple[SequenceToken, ...], reading: AttentionReading
) -> AttentionReport:
    layers = tuple(LayerError(*place, found.error) for place, found in reading.layers.items())
    return AttentionReport(
        kind="recomputed",
        model=run.model,
        architecture=run.architecture,
        dtype=run.dtype,
        device=run.device,
        prompt_tokens=len(run.prompt_tokens),
        tokens=tokens,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        heads=tuple(
            _head(config, place, found, index, head)
            for place, found in reading.layers.items()
            for index, head in enumerate(reading.asked.heads)
        ),
        layers=layers,
        reconstruction_error=float(np.max([layer.reconstruction_error for layer in layers])),
        notes=tuple(note for note in run.notes if note not in _SAID_ELSEWHERE),
    )


def _head(
    config: ModelConfig, place: tuple[int, int], found: LayerReading, index: int, head: int
) -> HeadAttention:
    figures = found.figures(index)
    top = int(found.last[index].argmax())
    return HeadAttention(
        step=place[0],
        layer=place[1],
        head=head,
        kv_head=kv_head_of(head, config.num_attention_heads, config.num_key_value_heads),
        positions=tuple(found.positions),
        **asdict(figures),
        character=figures.character,
        top_position=top,
        top_share=float(found.last[index, top]),
        rows=tuple(tuple(row[index].tolist()) for row in found.rows),
    )


def _grid(reading: AttentionReading, cached: int) -> Grid:
    """The grids of all layers, as far as the cache came: an early end leaves rows and columns out."""
    asked, (pooled, *_) = reading.asked, reading.grids.values()
    rows = spans_of(asked.rows[: bisect_left(asked.rows, cached)], pooled.row_width)
    columns = spans_of(range(rows[-1].last + 1), pooled.column_width)
    values = [reading.grids[layer].values().numpy() for layer in asked.layers]
    return Grid(
        layers=asked.layers,
        heads=asked.heads,
        rows=rows,
        columns=columns,
        values=np.stack(values)[:, :, : len(rows), : len(columns)],
        pooled=(pooled.row_width, pooled.column_width),
    )
