"""Records as rows of the database, from which `reading.py` makes them again."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from decodescope.trace.records import Branch, Run, Setting, Stage, Step
from decodescope.trace.tables import (
    BRANCH,
    BRANCH_SETTING,
    CANDIDATE,
    DRAW,
    INTERVENTION,
    KV_CACHE,
    MATRICES,
    NODE,
    NOTE,
    PROMPT_TOKEN,
    RUN,
    SETTING,
    STAGE,
    STAGE_PROB,
    STOP,
    VERSION,
    Row,
    Table,
)

FilterKey = tuple[str, str]
Rows = dict[Table, list[Row]]


def run_rows(run: Run) -> Rows:
    """Everything known before the first step. Raises ValueError for a setting that is no finite number."""
    stops = [(token_id, None) for token_id in run.stop_ids] + [(None, text) for text in run.stop_strings]
    return {
        RUN: [(1, *RUN.kept(run))],
        KV_CACHE: [] if run.cache_dtype is None else [(1, run.cache_dtype)],
        MATRICES: [] if run.weights is None else [(1, run.weights)],
        SETTING: [(i, _value_type(each), *SETTING.kept(each)) for i, each in enumerate(run.settings)],
        STOP: [(i, *stop) for i, stop in enumerate(stops)],
        VERSION: [(i, *version) for i, version in enumerate(run.versions.items())],
        NOTE: list(enumerate(run.notes)),
        PROMPT_TOKEN: _numbered(PROMPT_TOKEN, run.prompt_tokens),
    }


def step_rows(step: Step, filters: Mapping[FilterKey, int]) -> Rows:
    """One step; `filters` are the numbers of its sampler stages.

    Raises ValueError where a stage has another number of probabilities than there are candidates.
    """
    node = step.node
    if any(len(stage.probs) not in (0, len(step.candidates)) for stage in step.stages):
        raise ValueError(f"node {node} has stages with more or fewer probabilities than candidates")
    return {
        NODE: [NODE.kept(step)],
        CANDIDATE: _numbered(CANDIDATE, step.candidates, node),
        STAGE: [(node, i, filters[filter_key(each)], *STAGE.kept(each)) for i, each in enumerate(step.stages)],
        STAGE_PROB: [(node, i, *pair) for i, each in enumerate(step.stages) for pair in enumerate(each.probs)],
        DRAW: [] if step.mass_above is None else [(node, step.mass_above)],
        INTERVENTION: _numbered(INTERVENTION, step.interventions, node),
    }


def branch_rows(number: int, next_node: int, branch: Branch) -> Rows:
    """One fork that ended before `next_node` was made. Raises ValueError as `run_rows` does."""
    return {BRANCH: [(number, next_node, *BRANCH.kept(branch))], **branch_setting_rows(number, branch.settings)}


def branch_setting_rows(number: int, settings: Sequence[Setting]) -> Rows:
    """What a fork has other than the run. Raises ValueError as `run_rows` does."""
    rows = [(number, i, _value_type(each), *BRANCH_SETTING.kept(each)) for i, each in enumerate(settings)]
    return {BRANCH_SETTING: rows}


def filter_key(stage: Stage) -> FilterKey:
    """What makes two stages of different steps the same filter: name and settings, these as JSON."""
    return stage.name, json.dumps(stage.settings, ensure_ascii=False, allow_nan=False)


def _numbered(table: Table, records: Sequence[Any], *key: int) -> list[Row]:
    """Records in their order, numbered after `key`."""
    return [(*key, ordinal, *kept) for ordinal, kept in enumerate(map(table.kept, records))]


def _value_type(setting: Setting) -> str:
    if isinstance(setting.value, float) and not math.isfinite(setting.value):
        raise ValueError(f"setting {setting.name} is not a finite number")
    return type(setting.value).__name__
