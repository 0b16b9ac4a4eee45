"""The database of a run folder: its tables, its marks, and the check that a file is really one of ours."""

import sqlite3
from contextlib import closing
from functools import cache

APPLICATION_ID = 0x64736370  # "dscp"; `file` and sqlite3 show it
DATABASE = "trace.db"

_VERSION_1 = """
CREATE TABLE run ( -- one row: what was known before the first step
  id INTEGER PRIMARY KEY CHECK (id = 1),
  model TEXT NOT NULL, source TEXT NOT NULL, path TEXT NOT NULL, revision TEXT, sha256 TEXT,
  architecture TEXT NOT NULL, dtype TEXT NOT NULL, device TEXT NOT NULL, attention TEXT NOT NULL,
  use_cache INTEGER NOT NULL, prompt_text TEXT NOT NULL, max_new_tokens INTEGER NOT NULL,
  kv_bytes_per_token INTEGER NOT NULL, vocabulary INTEGER NOT NULL, started_at TEXT NOT NULL
);
CREATE TABLE setting ( -- sampling settings in force and who set them
  ordinal INTEGER PRIMARY KEY, name TEXT NOT NULL, value, value_type TEXT NOT NULL, origin TEXT NOT NULL
);
CREATE TABLE stop ( -- what ends the text: a token id or a string
  ordinal INTEGER PRIMARY KEY, token_id INTEGER, string TEXT
);
CREATE TABLE version ( -- software of the run
  ordinal INTEGER PRIMARY KEY, name TEXT NOT NULL, version TEXT NOT NULL
);
CREATE TABLE note ( -- sentences for the reader
  ordinal INTEGER PRIMARY KEY, text TEXT NOT NULL
);
CREATE TABLE prompt_token (
  ordinal INTEGER PRIMARY KEY, position INTEGER NOT NULL, token_id INTEGER NOT NULL, text TEXT NOT NULL,
  bytes_hex TEXT NOT NULL, role TEXT NOT NULL, injected INTEGER NOT NULL, partial INTEGER NOT NULL
);
CREATE TABLE node ( -- one row a step; branches part where two nodes have the same parent_id
  id INTEGER PRIMARY KEY, parent_id INTEGER REFERENCES node, step INTEGER NOT NULL, position INTEGER NOT NULL,
  token_id INTEGER NOT NULL, text TEXT NOT NULL, bytes_hex TEXT NOT NULL, delta_text TEXT NOT NULL,
  forced INTEGER NOT NULL,
  rank INTEGER NOT NULL, logprob_nats REAL, prob REAL, prob_final REAL, entropy_nats REAL, margin_logits REAL,
  kv_tokens INTEGER NOT NULL, kv_used_bytes INTEGER NOT NULL, kv_allocated_bytes INTEGER NOT NULL,
  forward_s REAL, sample_s REAL, total_s REAL,
  rss_bytes INTEGER NOT NULL, device_bytes INTEGER
);
CREATE TABLE candidate ( -- what could have been chosen at a node
  node_id INTEGER NOT NULL REFERENCES node, ordinal INTEGER NOT NULL, rank INTEGER NOT NULL,
  token_id INTEGER NOT NULL, text TEXT NOT NULL, bytes_hex TEXT NOT NULL,
  logit REAL, prob_raw REAL, prob_final REAL, removed_by TEXT,
  PRIMARY KEY (node_id, ordinal)
) WITHOUT ROWID;
CREATE TABLE sampler_filter ( -- a sampler stage with its settings (a JSON object), the same for many nodes
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, settings TEXT NOT NULL
);
CREATE TABLE stage ( -- what a filter left at a node
  node_id INTEGER NOT NULL REFERENCES node, ordinal INTEGER NOT NULL,
  filter_id INTEGER NOT NULL REFERENCES sampler_filter,
  survivors INTEGER NOT NULL, kept_mass REAL, entropy_nats REAL,
  PRIMARY KEY (node_id, ordinal)
) WITHOUT ROWID;
CREATE TABLE tensor ( -- index of tensors/NNNN.safetensors, NNNN being block
  block INTEGER NOT NULL, name TEXT NOT NULL, node_id INTEGER, dtype TEXT NOT NULL, shape TEXT NOT NULL,
  bytes INTEGER NOT NULL, PRIMARY KEY (block, name)
) WITHOUT ROWID;
CREATE TABLE ending ( -- one row when the run was ended in good order, else none
  id INTEGER PRIMARY KEY CHECK (id = 1),
  finish_reason TEXT NOT NULL, stop_token_id INTEGER, text TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
  new_tokens INTEGER NOT NULL, ttft_s REAL, decode_tokens_per_s REAL, peak_rss_bytes INTEGER,
  error TEXT, stop_string TEXT, node_id INTEGER REFERENCES node
);
"""

_VERSION_2 = """
CREATE TABLE site ( -- inner values summed up; node_id is what their pass led to (no row if nothing was chosen)
  id INTEGER PRIMARY KEY, node_id INTEGER NOT NULL, step INTEGER NOT NULL, layer INTEGER, site TEXT NOT NULL,
  shape TEXT NOT NULL, dtype TEXT NOT NULL, elements INTEGER NOT NULL,
  mean REAL, std REAL, min REAL, max REAL, l2 REAL, sum REAL, signature REAL, zeros REAL,
  nonfinite INTEGER NOT NULL, recomputed INTEGER NOT NULL
);
"""

_VERSION_3 = """
CREATE TABLE draw ( -- where the draw fell on the cumulative bar of the final distribution; only where one was made
  node_id INTEGER PRIMARY KEY REFERENCES node, mass_above REAL
);
CREATE TABLE stage_prob ( -- of a node's candidates after a stage; only where they were asked for
  node_id INTEGER NOT NULL REFERENCES node, stage INTEGER NOT NULL, candidate INTEGER NOT NULL, prob REAL,
  PRIMARY KEY (node_id, stage, candidate)
) WITHOUT ROWID;
CREATE TABLE intervention ( -- what a guard did after a node
  node_id INTEGER NOT NULL REFERENCES node, ordinal INTEGER NOT NULL, guard TEXT NOT NULL, action TEXT NOT NULL,
  measured REAL, threshold REAL, temperature REAL, PRIMARY KEY (node_id, ordinal)
) WITHOUT ROWID;
CREATE TABLE branch ( -- one row a fork that has ended; from finish_reason on as in ending
  id INTEGER PRIMARY KEY, next_node_id INTEGER NOT NULL, step INTEGER NOT NULL, started_at TEXT NOT NULL,
  finish_reason TEXT NOT NULL, stop_token_id INTEGER, text TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
  new_tokens INTEGER NOT NULL, ttft_s REAL, decode_tokens_per_s REAL, peak_rss_bytes INTEGER,
  error TEXT, stop_string TEXT, node_id INTEGER REFERENCES node
);
CREATE TABLE branch_setting ( -- what a fork has other than the run; of the one that has not ended, too
  branch_id INTEGER NOT NULL, ordinal INTEGER NOT NULL, name TEXT NOT NULL, value, value_type TEXT NOT NULL,
  origin TEXT NOT NULL, PRIMARY KEY (branch_id, ordinal)
) WITHOUT ROWID;
CREATE TABLE reopened ( -- one row each time that forks were added: ids below next_node_id were there before
  id INTEGER PRIMARY KEY, started_at TEXT NOT NULL, next_node_id INTEGER NOT NULL
);
"""

_VERSION_4 = """
CREATE TABLE kv_cache ( -- one row where keys and values were held in another dtype than the run's: this one
  id INTEGER PRIMARY KEY CHECK (id = 1), dtype TEXT NOT NULL
);
CREATE TABLE matrices ( -- one row where matrices were held in another form than the run's dtype: this one
  id INTEGER PRIMARY KEY CHECK (id = 1), form TEXT NOT NULL
);
"""

# Script N brings a database from user_version N to N + 1.
MIGRATIONS = (_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4)
FORMAT = len(MIGRATIONS)
_DEFINED = "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"


def build(connection: sqlite3.Connection, version: int = FORMAT, known: int = 0) -> None:
    """Make the tables and marks of a format out of those of format `known` (0: an empty database).

    The caller holds the transaction.
    """
    for statement in "".join(MIGRATIONS[known:version]).split(";\n"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")


@cache
def _definitions(version: int) -> frozenset[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as memory:
        build(memory, version)
        return frozenset(memory.execute(_DEFINED))


def is_ours(connection: sqlite3.Connection, version: int) -> bool:
    """Whether every table of a format is there, defined word for word as `build` does it; more do not matter.

    Views or computed columns under our names could run anything, so no other definition is read.
    """
    wanted = _definitions(version)
    return wanted.intersection(connection.execute(_DEFINED)) == wanted
