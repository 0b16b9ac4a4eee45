"""Laws of the JSON form of a run, and of its schemas."""

import io
import json
import math
import runpy
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from sample_records import (
    BRANCHES,
    ENDS,
    RUNS,
    STEPS,
    chain,
    plain_branch,
    plain_end,
    plain_intervention,
    plain_run,
    plain_step,
)

from decodescope.trace.export import export_jsonl
from decodescope.trace.lines import NONFINITE, TYPES, json_text, record_line
from decodescope.trace.records import Trace

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
STEP_KEYS = (
    "type step position token_id bytes_hex text delta_text node parent rank logprob_nats prob prob_final"
    " entropy_nats margin_logits candidates stages kv timing memory forced mass_above"
    " interventions"
)
END_KEYS = (
    "type finish_reason stop_token_id text prompt_tokens new_tokens ttft_s decode_tokens_per_s peak_rss_bytes"
    " trace error stop_string node stop_guard"
)


def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((SCHEMAS / f"{kind}-line.json").read_text(encoding="utf-8")))


@given(RUNS | STEPS | ENDS | BRANCHES)
def test_a_record_comes_back_exactly_from_its_line(record):
    line = json.loads(json_text(record_line(record)))
    assert TYPES[line.pop("type")] is type(record)
    back = TypeAdapter(type(record)).validate_python(line)
    assert repr(back) == repr(record)  # repr tells -0.0 from 0.0 and lets NaN equal itself


@given(RUNS | STEPS | ENDS | BRANCHES)
def test_a_line_is_one_line_of_printable_utf8(record):
    text = json_text(record_line(record))
    assert len(text.splitlines()) == 1
    assert text.encode()
    assert not [sign for sign in text if sign < " " or "\x7f" <= sign <= "\x9f" or sign in "\u202e\u2028\u2066"]


@given(RUNS | STEPS | ENDS | BRANCHES)
def test_every_line_fits_its_schema(record):
    line = json.loads(json_text(record_line(record)))
    validator(line["type"]).validate(line)


def test_the_keys_are_those_of_the_contract_in_their_order():
    step = record_line(plain_step(0, None))
    assert list(step) == STEP_KEYS.split()
    assert list(record_line(plain_end())) == END_KEYS.split()
    assert list(step["candidates"][0]) == (
        ["rank", "token_id", "text", "bytes_hex", "logit", "prob_raw", "prob_final", "removed_by"]
    )
    assert list(step["stages"][0]) == ["name", "settings", "survivors", "kept_mass", "entropy_nats", "probs"]
    assert [list(step[part]) for part in ("kv", "timing", "memory")] == [
        ["tokens", "used_bytes", "allocated_bytes"],
        ["forward_s", "sample_s", "total_s"],
        ["rss_bytes", "device_bytes"],
    ]
    acted = record_line(replace(plain_step(0, None), interventions=(plain_intervention(),)))["interventions"]
    assert list(acted[0]) == ["guard", "action", "measured", "threshold", "temperature"]
    assert list(record_line(plain_branch(0))) == ["type", "step", "settings", "started_at", "end"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_json_cannot_hold_are_named_and_null_stays_unknown(value):
    line = record_line(replace(plain_end(), ttft_s=value))
    assert line["stop_token_id"] is None
    named = json.loads(json_text(line))["ttft_s"]
    assert named in NONFINITE
    assert repr(float(named)) == repr(value)


def broken_lines():
    step = record_line(plain_step(1, None, candidates=2))
    yield {**step, "surprise": 1}
    yield {key: value for key, value in step.items() if key != "kv"}
    yield {**step, "step": "1"}
    yield {**step, "forced": 1}
    yield {**step, "prob": "high"}
    yield {**step, "candidates": [{**step["candidates"][0], "rank": None}]}
    yield {**step, "candidates": {}}
    yield {**step, "kv": [1, 2, 3]}
    yield {**record_line(plain_end()), "finish_reason": "tired"}
    yield {**record_line(plain_end()), "ttft_s": True}
    yield {**record_line(plain_run()), "versions": {"torch": 2}}
    yield {**step, "interventions": [{"guard": "loop"}]}
    yield {**record_line(plain_branch(0)), "end": None}
    yield {**record_line(plain_branch(0)), "settings": {"temperature": 1.0}}


@pytest.mark.parametrize("line", list(broken_lines()), ids=range(14))
def test_a_broken_line_is_refused_by_the_schema(line):
    assert not validator(line["type"]).is_valid(line)


def test_the_schema_files_are_what_the_records_say():
    made = runpy.run_path(str(ROOT / "scripts" / "make_schemas.py"))
    expected = {name: made["text"](schema) for name, schema in made["schemas"]().items()}
    assert {name: (SCHEMAS / name).read_text(encoding="utf-8") for name in expected} == expected
    for schema in made["schemas"]().values():
        Draft202012Validator.check_schema(schema)


def test_an_export_is_the_lines_of_run_json():
    trace = Trace(plain_run(), chain(3), plain_end())
    stream = io.StringIO()
    export_jsonl(trace, stream)
    lines = stream.getvalue().splitlines()
    assert lines == [json_text(record_line(record)) for record in (trace.run, *trace.steps, trace.end)]
    assert [json.loads(line)["type"] for line in lines] == ["run", "step", "step", "step", "end"]


def test_an_export_tells_of_the_forks_after_the_end():
    trace = Trace(plain_run(), chain(3), plain_end(), [plain_branch(2), plain_branch(1)])
    stream = io.StringIO()
    export_jsonl(trace, stream)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["type"] for line in lines[4:]] == ["end", "branch", "branch"]
    assert [line["end"]["node"] for line in lines[5:]] == [2, 1]


def test_an_export_of_an_unfinished_trace_has_no_end_line():
    stream = io.StringIO()
    export_jsonl(Trace(plain_run(), chain(1)), stream)
    assert [json.loads(line)["type"] for line in stream.getvalue().splitlines()] == ["run", "step"]


def test_a_line_costs_far_less_than_a_step():
    step = plain_step(1, 0)
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        record_line(step)
        best = min(best, time.perf_counter() - start)
    assert best < 0.3e-3
