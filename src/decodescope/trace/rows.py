"""Records as rows of the database."""

import json
import math
from typing import Any

from decodescope.trace.records import End, Run, Setting, Stage, Step
from decodescope.trace.tables import ENDING, NOTE, PROMPT_TOKEN, RUN, SETTING, STOP, VERSION, Row, Table
from decodescope.trace.tensors import SavedTensor

FilterKey = tuple[str, str]


def run_rows(run: Run) -> dict[Table, list[Row]]:
    """The rows of everything known before the first step."""
    head = tuple(getattr(run, name) for name, _ in RUN.columns[1:])
    stops = [(token_id, None) for token_id in run.stop_ids] + [(None, text) for text in run.stop_strings]
    prompt = [
        (item.position, item.token_id, item.text, item.bytes_hex, item.role, item.injected, item.partial)
        for item in run.prompt_tokens
    ]
    return {
        RUN: [(1, *head)],
        SETTING: _numbered([_setting_row(item) for item in run.settings]),
        STOP: _numbered(stops),
        VERSION: _numbered(list(run.versions.items())),
        NOTE: _numbered([(note,) for note in run.notes]),
        PROMPT_TOKEN: _numbered(prompt),
    }


def node_row(step: Step) -> Row:
    """The step itself."""
    kv, timing, memory = step.kv, step.timing, step.memory
    return (
        step.node, step.parent, step.step, step.position, step.token_id, step.text, step.bytes_hex,
        step.delta_text, step.forced, step.rank,
        step.logprob_nats, step.prob, step.prob_final, step.entropy_nats, step.margin_logits,
        kv.tokens, kv.used_bytes, kv.allocated_bytes,
        timing.forward_s, timing.sample_s, timing.total_s, memory.rss_bytes, memory.device_bytes,
    )  # fmt: skip


def candidate_rows(step: Step) -> list[Row]:
    """The step's candidates in their order."""
    return [
        (step.node, i, c.rank, c.token_id, c.text, c.bytes_hex,
         c.logit, c.prob_raw, c.prob_final, c.removed_by)
        for i, c in enumerate(step.candidates)
    ]  # fmt: skip


def filter_key(stage: Stage) -> FilterKey:
    """What makes two stages of different steps the same filter: name and settings, these as JSON."""
    return stage.name, json.dumps(stage.settings, ensure_ascii=False, allow_nan=False)


def stage_rows(step: Step, filters: dict[FilterKey, int]) -> list[Row]:
    """The step's stages in their order, each pointing to its filter's id."""
    return [
        (step.node, i, filters[filter_key(stage)], stage.survivors, stage.kept_mass, stage.entropy_nats)
        for i, stage in enumerate(step.stages)
    ]


def tensor_rows(block: int, entries: list[SavedTensor]) -> list[Row]:
    """The index of one block."""
    return [
        (block, entry.name, entry.node, entry.dtype, json.dumps(entry.shape), entry.bytes) for entry in entries
    ]


def end_row(end: End) -> Row:
    """The end; `trace` is left out, for a folder may be moved."""
    return (1, *(getattr(end, name) for name, _ in ENDING.columns[1:]))


def _numbered(rows: list[Any]) -> list[Row]:
    return [(ordinal, *row) for ordinal, row in enumerate(rows)]


def _setting_row(setting: Setting) -> Row:
    if isinstance(setting.value, float) and not math.isfinite(setting.value):
        raise ValueError(f"setting {setting.name} is not a finite number")
    return setting.name, setting.value, type(setting.value).__name__, setting.origin
