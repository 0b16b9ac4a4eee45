"""The tables of a run as the code sees them: columns in order, what each may hold, what orders the rows.

NaN is kept as NULL in the `real` columns, which always hold a measurement, so that SQL's averages skip it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

Row = tuple[Any, ...]
MISSING = type(None)
# What each kind of column may hold in a sound file.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "int?": (int, MISSING), "text": (str,), "text?": (str, MISSING),
    "real": (float, MISSING), "real?": (float, MISSING), "any": (int, float, str, MISSING),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table's columns as `name:kind` words; the first `key` of them order it and are unique."""

    name: str
    spec: str
    key: int = 1

    @cached_property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of each column."""
        pairs = (word.partition(":") for word in self.spec.split())
        return tuple((name, kind) for name, _, kind in pairs)

    @cached_property
    def insert(self) -> str:
        """The INSERT statement, a placeholder for every column."""
        marks = ", ".join("?" * len(self.columns))
        return f"INSERT INTO {self.name} ({self._names(len(self.columns))}) VALUES ({marks})"

    @cached_property
    def select(self) -> str:
        """The SELECT statement for all rows in key order."""
        return f"SELECT {self._names(len(self.columns))} FROM {self.name} ORDER BY {self._names(self.key)}"

    def _names(self, count: int) -> str:
        return ", ".join(name for name, _ in self.columns[:count])


RUN = Table(
    "run",
    "id:int model:text source:text path:text revision:text? sha256:text? architecture:text dtype:text"
    " device:text attention:text use_cache:int prompt_text:text max_new_tokens:int kv_bytes_per_token:int"
    " vocabulary:int started_at:text",
)
SETTING = Table("setting", "ordinal:int name:text value:any value_type:text origin:text")
STOP = Table("stop", "ordinal:int token_id:int? string:text?")
VERSION = Table("version", "ordinal:int name:text version:text")
NOTE = Table("note", "ordinal:int text:text")
PROMPT_TOKEN = Table(
    "prompt_token",
    "ordinal:int position:int token_id:int text:text bytes_hex:text role:text injected:int partial:int",
)
NODE = Table(
    "node",
    "id:int parent_id:int? step:int position:int token_id:int text:text bytes_hex:text"
    " delta_text:text forced:int rank:int"
    " logprob_nats:real prob:real prob_final:real entropy_nats:real margin_logits:real kv_tokens:int"
    " kv_used_bytes:int kv_allocated_bytes:int forward_s:real sample_s:real total_s:real rss_bytes:int"
    " device_bytes:int?",
)
CANDIDATE = Table(
    "candidate",
    "node_id:int ordinal:int rank:int token_id:int text:text bytes_hex:text"
    " logit:real prob_raw:real prob_final:real removed_by:text?",
    key=2,
)
FILTER = Table("sampler_filter", "id:int name:text settings:text")
STAGE = Table(
    "stage", "node_id:int ordinal:int filter_id:int survivors:int kept_mass:real entropy_nats:real", key=2
)
TENSOR = Table("tensor", "block:int name:text node_id:int? dtype:text shape:text bytes:int", key=2)
ENDING = Table(
    "ending",
    "id:int finish_reason:text stop_token_id:int? text:text prompt_tokens:int new_tokens:int ttft_s:real?"
    " decode_tokens_per_s:real? peak_rss_bytes:int? error:text? stop_string:text?",
)
TABLES = (
    RUN, SETTING, STOP, VERSION, NOTE, PROMPT_TOKEN, NODE, CANDIDATE, FILTER, STAGE, TENSOR, ENDING,
)  # fmt: skip
