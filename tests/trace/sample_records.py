"""Records for the tests: any that can be, by hypothesis, and a small plain run with a fork."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

from hypothesis import strategies as st

from decodescope.trace import tables
from decodescope.trace.records import (
    Action,
    Branch,
    Candidate,
    End,
    Intervention,
    Kv,
    Memory,
    PromptToken,
    Run,
    Setting,
    Stage,
    Step,
    Timing,
)
from decodescope.trace.schema import DATABASE, build

TABLES = [value for value in vars(tables).values() if isinstance(value, tables.Table)]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["春天", "👩‍👩‍👧", "\x00\x1b[31m", "\u202e", "\u2028", "e\u0301", "\ufffd", "'; DROP TABLE node; --"]
)
HEX = st.binary(max_size=4).map(bytes.hex)
COUNT = st.integers(-(2**63), 2**63 - 1)
MEASURED = st.floats()
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FLAG = st.booleans()
VALUE = st.none() | FLAG | COUNT | FINITE | TEXT


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


def tuples(strategy: st.SearchStrategy, size: int = 3) -> st.SearchStrategy:
    return st.lists(strategy, max_size=size).map(tuple)


SETTING = st.builds(Setting, TEXT, VALUE, TEXT)
PROMPT_TOKENS = st.builds(PromptToken, COUNT, COUNT, TEXT, HEX, TEXT, FLAG, FLAG)
RUNS = st.builds(
    Run,
    model=TEXT, source=TEXT, path=TEXT, revision=maybe(TEXT), sha256=maybe(TEXT), architecture=TEXT,
    dtype=TEXT, device=TEXT, attention=TEXT, use_cache=FLAG, prompt_text=TEXT,
    prompt_tokens=tuples(PROMPT_TOKENS), settings=tuples(SETTING),
    stop_ids=tuples(COUNT), stop_strings=tuples(TEXT), max_new_tokens=COUNT, kv_bytes_per_token=COUNT,
    vocabulary=COUNT, versions=st.dictionaries(TEXT, TEXT, max_size=3), started_at=TEXT, notes=tuples(TEXT),
    cache_dtype=maybe(TEXT),
)  # fmt: skip
CANDIDATES = st.builds(Candidate, COUNT, COUNT, TEXT, HEX, MEASURED, MEASURED, MEASURED, maybe(TEXT))
SETTINGS = st.dictionaries(TEXT, VALUE | st.lists(VALUE, max_size=2), max_size=2)
STAGES = st.builds(Stage, TEXT, SETTINGS, COUNT, MEASURED, MEASURED)
INTERVENTIONS = st.builds(Intervention, TEXT, st.sampled_from(get_args(Action)), MEASURED, MEASURED, maybe(FINITE))
_STEPS = st.builds(
    Step,
    COUNT, COUNT, COUNT, HEX, TEXT, TEXT, node=st.just(0), parent=st.none(), rank=COUNT,
    logprob_nats=MEASURED, prob=MEASURED, prob_final=MEASURED, entropy_nats=MEASURED, margin_logits=MEASURED,
    candidates=tuples(CANDIDATES), stages=tuples(STAGES), kv=st.builds(Kv, COUNT, COUNT, COUNT),
    timing=st.builds(Timing, MEASURED, MEASURED, MEASURED), memory=st.builds(Memory, COUNT, maybe(COUNT)),
    forced=FLAG, mass_above=maybe(MEASURED), interventions=tuples(INTERVENTIONS),
)  # fmt: skip


@st.composite
def _with_stage_probs(draw: st.DrawFn) -> Step:
    """Some stages know what became of every candidate."""
    step = draw(_STEPS)
    size = len(step.candidates)
    probs = st.just(()) | st.lists(MEASURED, min_size=size, max_size=size).map(tuple)
    return replace(step, stages=tuple(replace(stage, probs=draw(probs)) for stage in step.stages))


STEPS = _with_stage_probs()
ENDS = st.builds(
    End,
    finish_reason=st.sampled_from(["stop", "length", "interrupted", "error"]), stop_token_id=maybe(COUNT),
    text=TEXT, prompt_tokens=COUNT, new_tokens=COUNT, ttft_s=maybe(FINITE),
    decode_tokens_per_s=maybe(FINITE), peak_rss_bytes=maybe(COUNT), error=maybe(TEXT), stop_string=maybe(TEXT),
    stop_guard=maybe(TEXT),
)  # fmt: skip
BRANCHES = st.builds(
    Branch, step=st.integers(0, 2**63 - 1), settings=tuples(SETTING), started_at=TEXT, end=ENDS
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> list[Step]:
    """Steps whose node ids grow, with gaps, under any earlier node or none."""
    steps: list[Step] = []
    node = draw(st.integers(-3, 3))
    for step in draw(st.lists(STEPS, max_size=4)):
        parent = draw(st.sampled_from([None, *(made.node for made in steps)]))
        steps.append(replace(step, node=node, parent=parent))
        node += draw(st.integers(1, 5))
    return steps


def plain_run() -> Run:
    prompt = tuple(PromptToken(i, 100 + i, f"p{i}", f"p{i}".encode().hex(), "user") for i in range(5))
    return Run(
        "starter", "file", "/models/m.gguf", None, "ab" * 32, "Qwen2ForCausalLM", "float32", "cpu", "sdpa", True,
        "p0p1p2p3p4", prompt, (Setting("temperature", 0.7, "command line"), Setting("top_k", 20, "default")),
        (151645,), ("END",), 64, 24576, 151936, {"torch": "2.13.0"}, "2026-01-01T00:00:00Z", ("a note",),
    )  # fmt: skip


def plain_step(number: int, parent: int | None, candidates: int = 50) -> Step:
    """A step as a real run makes them; `number` is step and node."""
    options = tuple(
        Candidate(
            rank, number + rank, f"tok{rank}", f"tok{rank}".encode().hex(), 20.0 - rank / 3, 0.5 / rank,
            0.6 / rank if rank < 20 else 0.0, None if rank < 20 else "top_k",
        )
        for rank in range(1, candidates + 1)
    )  # fmt: skip
    stages = (
        Stage("temperature", {"temperature": 0.7}, 151936, 1.0, 1.5),
        Stage("top_k", {"top_k": 20}, 20, 0.9, 1.25),
    )
    return Step(
        number, 5 + number, options[0].token_id, options[0].bytes_hex, options[0].text, f" w{number}", number,
        parent, 1, -0.7, 0.5, 0.6, 1.0 + number / 100, 0.3, options, stages,
        Kv(5 + number, 1000 * number, 2000 * number), Timing(0.05, 0.001, 0.06), Memory(10**9 + number, None),
    )  # fmt: skip


def chain(count: int) -> list[Step]:
    return [plain_step(n, n - 1 if n else None) for n in range(count)]


def plain_end(text: str = "all") -> End:
    return End("length", None, text, 5, 3, 0.051, 16.5, 10**9)


def plain_intervention(action: Action = "warn") -> Intervention:
    return Intervention("loop", action, 12.0, 8.0, None)


def plain_branch(node: int | None, step: int = 0) -> Branch:
    return Branch(step, (), "2026-01-02T00:00:00Z", replace(plain_end(), node=node))


def as_format(version: int, folder: Path, old: Path) -> Path:
    """The run as a program of an older format would have saved it: its tables, without the later ones."""
    old.mkdir()
    with closing(sqlite3.connect(old / DATABASE)) as connection:
        build(connection, version)
        connection.commit()
        connection.execute("ATTACH ? AS new", (str(folder / DATABASE),))
        for table in TABLES:
            if table.since <= version:
                connection.execute(f"INSERT INTO main.{table.name} SELECT * FROM new.{table.name}")
        connection.commit()
    return old


def query(folder: Path, question: str) -> list[tuple]:
    """What anybody's sqlite3 says."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        return connection.execute(question).fetchall()


def edit(folder: Path, script: str) -> Path:
    """The run after someone else's SQL."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.executescript(script)
    return folder
