"""The real starter models against ids that transformers generated (scripts/make_references.py)."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decodescope import Session
from decodescope.generate import Limits, generate
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler

ROOT = Path(__file__).resolve().parents[2]
STORED = json.loads((Path(__file__).parent / "references.json").read_text(encoding="utf-8"))


def cases() -> list[Any]:
    """All of the starter; of the small model six greedy and six sampled ones, the rest in `make test-full`."""
    quick = {*range(6), *range(20, 26)}
    numbered = [(name, n) for name, stored in STORED["cases"].items() for n in range(len(stored))]
    return [
        pytest.param(name, n, marks=() if name == "starter" or n in quick else pytest.mark.full)
        for name, n in numbered
    ]


RECOMPUTED = [("starter", 12), ("starter", 21)]  # one greedy, one sampled; short, but each with a real answer


pytestmark = pytest.mark.usefixtures("all_threads")


@cache
def session_of(name: str) -> Session:
    return Session.open(name)


@pytest.fixture
def session(request: pytest.FixtureRequest, name: str) -> Session:
    request.getfixturevalue("starter_path" if name == "starter" else "small_path")
    return session_of(name)


def ours(session: Session, case: dict[str, Any]) -> list[int]:
    params = SamplingParams(**{"temperature": 0, **case["settings"], "seed": case.get("seed")})
    stops = session.tokenizer.end_ids if case["stops"] else frozenset()
    limits = Limits(case["max_new_tokens"], stops)
    return [s[0].choice.token_id for s in generate(session.model, [case["prompt_ids"]], [Sampler(params)], limits)]


@pytest.mark.parametrize(("name", "number"), cases(), ids=str)
def test_our_ids_are_the_stored_ids_of_transformers(session, name, number):
    case = STORED["cases"][name][number]
    assert ours(session, case) == case["ids"]


@pytest.mark.parametrize("name", ["starter"])
def test_our_prompt_ids_are_those_of_transformers(session, name):
    for case in STORED["cases"][name]:
        assert session.prompt(case["text"]).ids == case["prompt_ids"]


@pytest.mark.parametrize("name", ["starter"])
def test_logits_of_a_real_model_equal_within_1e_4(session, name):
    ids = torch.tensor([STORED["cases"][name][0]["prompt_ids"]])
    with torch.inference_mode():
        expected = recomputing(name).model(ids).logits
    torch.testing.assert_close(session.model(ids, every_logit=True), expected, atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["starter"])
def test_16_bit_logits_of_a_real_model_are_bit_identical(session, name, dtype):
    path = session.files.path
    load = transformers.AutoModelForCausalLM.from_pretrained  # `.to(dtype)` would cast the rotary frequencies too
    theirs = load(path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)).eval()
    ours = Session.open(name, dtype=dtype)
    ids = torch.tensor([STORED["cases"][name][0]["prompt_ids"]])
    with torch.inference_mode():
        expected = theirs(ids).logits
    assert torch.equal(ours.model(ids, every_logit=True), expected)


@pytest.mark.parametrize(("name", "number"), RECOMPUTED, ids=str)
def test_transformers_still_generates_what_is_stored(session, name, number):
    assert recomputing(name).generate(STORED["cases"][name][number]) == STORED["cases"][name][number]["ids"]


@cache
def recomputing(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_references import Reference

    return Reference(name)


@pytest.mark.parametrize("name", ["starter-small"])
def test_a_padded_batch_of_real_prompts_is_each_prompt_alone(session, name):
    cases = [case for case in STORED["cases"][name] if not case["settings"] and case["stops"]][:6]
    limits = Limits(64, session.tokenizer.end_ids)
    samplers = [Sampler(SamplingParams()) for _ in cases]
    rows: list[list[int]] = [[] for _ in cases]
    for step in generate(session.model, [case["prompt_ids"] for case in cases], samplers, limits):
        for decoded in step:
            rows[decoded.row].append(decoded.choice.token_id)
    assert rows == [case["ids"] for case in cases]
