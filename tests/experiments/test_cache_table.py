"""The cache as it is held, beside the formula; and the same tokens with and without it, every position counted."""

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from decodescope import Session
from decodescope.errors import FindingError, InputError
from decodescope.experiments.cache_curve import CachePlan, compare, prompt_of_length, study_cache, token_forwards
from decodescope.experiments.cache_records import CacheReport
from decodescope.experiments.cache_table import cache_dtypes, gqa_saving, layer_cache, room
from decodescope.experiments.passes import counted
from decodescope.model.config import read_config
from decodescope.model.cost import kv_bytes_per_token
from decodescope.model.kv_cache import KVCache
from families import BY_NAME
from tiny_model import make_tiny_model

CONFIG = Path(__file__).resolve().parents[1] / "data" / "configs" / "qwen2.5-7b-instruct.config.json"
LENGTHS = (1, 7, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("kv") / "qwen2")


@pytest.fixture(scope="module")
def session(folder) -> Session:
    return Session.open(str(folder))


def with_tokenizer(name: str, folder: Path, target: Path) -> Path:
    """A tiny model of a family, with the byte tokenizer of another folder."""
    family = BY_NAME[name]
    replace(family, settings={**family.settings, "vocab_size": 260}).save(target)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, target)
    return target


def last(session: Session, plan: CachePlan, text: str = "Hello") -> CacheReport:
    *_, report = study_cache(session, session.prompt(text, chat=False), plan)
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["qwen2-mha-tied", "qwen2-mqa", "qwen2-window", "qwen3-gqa", "llama-gqa", "mistral-gqa"]
)
def test_every_layer_holds_what_the_formula_says(name, dtype, folder, tmp_path):
    session = Session.open(str(with_tokenizer(name, folder, tmp_path / "model")), dtype=dtype)
    config, report = session.model.config, last(session, CachePlan(5))
    positions = 5 + 4  # the prompt, and every new token but the last
    shape = (1, config.num_key_value_heads, positions, config.head_dim)
    per_layer = 2 * config.num_key_value_heads * config.head_dim * (4 if dtype == "float32" else 2) * positions
    assert [layer.layer for layer in report.layers] == [0, 1, 2]
    for layer in report.layers:
        assert (layer.shape, layer.dtype, layer.device) == (shape, dtype, "cpu")
        assert layer.used_bytes == layer.formula_bytes == per_layer
        assert layer.allocated_bytes == per_layer // positions * 256
        assert layer.agrees
    assert report.agrees and report.used_bytes == report.formula_bytes == 3 * per_layer
    assert report.allocated_bytes == sum(layer.allocated_bytes for layer in report.layers)
    assert report.bytes_per_token == report.bytes_per_token_formula == 3 * per_layer // positions


@pytest.mark.parametrize(
    ("held", "dtype", "head_bytes"),
    [
        ("float32", "float32", 4 * 8),
        ("bfloat16", "bfloat16", 2 * 8),
        ("float8", "float8_e4m3fn", 8 + 4),
        ("int8", "int8", 8 + 4),
    ],
)
def test_every_layer_holds_what_the_formula_says_in_every_format(held, dtype, head_bytes, folder):
    session = Session.open(str(folder), cache_dtype=held)
    report = last(session, CachePlan(5, (4,)))
    positions, per_layer = 9, 2 * 2 * head_bytes
    for layer in report.layers:
        assert (layer.shape, layer.dtype) == ((1, 2, positions, 8), dtype)
        assert layer.used_bytes == layer.formula_bytes == per_layer * positions
        assert layer.allocated_bytes == per_layer * 256
    assert report.agrees and report.bytes_per_token == report.bytes_per_token_formula == 2 * per_layer
    assert [step.used_bytes for step in report.steps] == [step.formula_bytes for step in report.steps]
    assert [row.dtype for row in report.cache_dtypes if row.in_use] == [held]
    assert report.gqa.bytes_per_token == 2 * per_layer


@pytest.mark.parametrize(
    "name", ["qwen2-gqa", "qwen2-window", "qwen3-tied-bias", "llama-mqa-tied", "mistral-window"]
)
def test_both_ways_choose_the_same_tokens_and_every_position_is_counted(name, folder, tmp_path):
    session = Session.open(str(with_tokenizer(name, folder, tmp_path / "model")))
    report = last(session, CachePlan(6, LENGTHS))
    for use_cache, timings in ((True, report.cached), (False, report.uncached)):
        assert [timing.length for timing in timings] == list(LENGTHS)
        for timing in timings:
            assert timing.token_forwards == timing.token_forwards_formula
            assert timing.token_forwards == token_forwards(timing.length, 6, use_cache)
            assert timing.seconds > 0 and len(timing.token_ids) == 6
    assert [(c.same_tokens, c.parts_at) for c in report.compared] == [(True, None)] * 3
    assert [t.token_ids for t in report.cached] == [t.token_ids for t in report.uncached]


def test_twenty_tokens_behind_thirty_six_take_55_positions_with_the_cache_and_910_without(session):
    report = last(session, CachePlan(20, (36,)))
    (cached,), (uncached,), (compared,) = report.cached, report.uncached, report.compared
    assert (cached.token_forwards, uncached.token_forwards) == (55, 910)
    assert compared.token_forwards_ratio == pytest.approx(16.545, abs=0.001)


def test_the_closed_formula_is_the_sum_of_the_passes():
    for length in (1, 2, 36, 500):
        for new in (1, 2, 20):
            assert token_forwards(length, new, use_cache=False) == sum(range(length, length + new))
            assert token_forwards(length, new, use_cache=True) == length + sum(1 for _ in range(new - 1))


def test_the_counter_counts_each_row_and_sees_the_cache(session):
    cache = KVCache(session.model.config.num_hidden_layers)
    with counted(session.model) as passes:
        session.model(torch.zeros(2, 3, dtype=torch.long), cache)
        session.model(torch.zeros(2, 1, dtype=torch.long), cache)
        assert (passes.token_forwards, passes.cache) == (8, cache)
        session.model(torch.zeros(1, 4, dtype=torch.long))
    session.model(torch.zeros(1, 4, dtype=torch.long))
    assert (passes.token_forwards, passes.cache) == (12, None)


def test_the_cache_grows_by_what_was_fed(session):
    steps = last(session, CachePlan(4)).steps
    assert [step.fed_tokens for step in steps] == [5, 1, 1, 1]
    assert [step.cached_tokens for step in steps] == [5, 6, 7, 8]
    per_token = steps[0].used_bytes // 5
    assert [step.used_bytes for step in steps] == [step.formula_bytes for step in steps]
    assert [step.used_bytes for step in steps] == [per_token * tokens for tokens in (5, 6, 7, 8)]


def test_a_cache_that_was_fed_twice_does_not_agree():
    cache = KVCache(1)
    for _ in range(2):  # the mistake of sending the whole sequence again
        cache.append(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        cache.advance(3)
    right = 2 * 2 * 4 * 4 * 3
    assert not layer_cache(cache, 0, right).agrees
    assert layer_cache(cache, 0, 2 * right).agrees


def test_the_seven_billion_model_costs_what_is_known():
    config = read_config(CONFIG)
    assert kv_bytes_per_token(config, 2) == 57_344
    saving = gqa_saving(config, 57_344)
    assert (saving.query_heads, saving.kv_heads, saving.ratio, saving.mha_bytes_per_token) == (28, 4, 7.0, 401_408)
    rows = {row.dtype: row for row in cache_dtypes(config, "bfloat16")}
    assert {name: row.bytes_per_token for name, row in rows.items()} == {
        "float32": 114_688, "bfloat16": 57_344, "float16": 57_344, "float8": 29_568, "int8": 29_568,
    }  # fmt: skip
    assert rows["bfloat16"].bytes_at == {4096: 234_881_024, 32768: 1_879_048_192, 131072: 7_516_192_768}
    assert [name for name, row in rows.items() if row.in_use] == ["bfloat16"]


def test_tokens_left_end_at_the_memory_or_at_the_context():
    config = read_config(CONFIG)
    tight = room(config, 0, (8 << 30, 57_344 * 1000 + 5), (100, 57_344))
    assert (tight.tokens_by_memory, tight.tokens_left) == (1000, 1000)
    wide = room(config, 0, (1 << 40, 1 << 40), (100, 57_344))
    assert wide.tokens_left == 32_768 - 100 < wide.tokens_by_memory


def test_a_prompt_is_repeated_or_cut_to_its_length(session):
    prompt = session.prompt("abc", chat=False)
    assert prompt_of_length(prompt, 2).ids == prompt.ids[:2]
    longer = prompt_of_length(prompt, 8)
    assert longer.ids == (prompt.ids * 3)[:8] and longer.text == "abcabcab"


def test_where_two_ways_part_is_told(session):
    cached = last(session, CachePlan(4, (5,))).cached[0]
    other = replace(cached, token_ids=(*cached.token_ids[:2], 259, cached.token_ids[3]), token_forwards=4)
    assert (compare(cached, other).same_tokens, compare(cached, other).parts_at) == (False, 2)


def test_repeats_are_kept_and_their_median_is_shown(session):
    (timing,) = last(session, CachePlan(2, (4,), repeats=3)).cached
    assert len(timing.repeats_seconds) == 3
    assert timing.seconds == sorted(timing.repeats_seconds)[1]


def test_progress_runs_up_to_all_positions(session):
    told: list[tuple[int, int]] = []
    plan = CachePlan(3, (2, 5), repeats=2)
    for _ in study_cache(session, session.prompt("Hi", chat=False), plan, lambda *at: told.append(at)):
        pass
    whole = 2 * sum(token_forwards(length, 3, way) for length in (2, 5) for way in (True, False))
    assert told == sorted(told) and told[-1] == (whole, whole)


def test_the_report_grows_and_says_when_it_is_complete(session):
    reports = list(study_cache(session, session.prompt("Hi", chat=False), CachePlan(3, (2, 4))))
    assert [len(report.steps) for report in reports] == [1, 2, 3, 3, 3, 3, 3]
    assert [len(report.compared) for report in reports] == [0, 0, 0, 0, 1, 2, 2]
    assert [report.complete for report in reports] == [False] * 6 + [True]
    assert [report.finish_reason for report in reports[:4]] == [None, None, None, "length"]


def test_what_was_measured_stays_when_the_reader_is_interrupted(session):
    calls = count()

    def interrupt(done: int, total: int) -> None:
        if next(calls) == 5:  # inside the second length: two ways of two tokens were told before
            raise KeyboardInterrupt

    seen: list[CacheReport] = []
    with pytest.raises(KeyboardInterrupt):
        for report in study_cache(session, session.prompt("Hi", chat=False), CachePlan(2, (3, 6)), interrupt):
            seen.append(report)
    assert [timing.length for timing in seen[-1].cached] == [3] and not seen[-1].complete


@pytest.mark.parametrize(
    ("numbers", "word"),
    [((0,), "max-new-tokens"), ((1, (4, 0)), "4,0"), ((1, (-3,)), "-3"), ((1, (4,), 0), "repeats")],
)
def test_numbers_that_cannot_be_are_refused(numbers, word):
    with pytest.raises(InputError, match=word):
        CachePlan(*numbers)


def test_a_length_beyond_the_context_is_refused_before_any_work(session):
    prompt = session.prompt("Hi", chat=False)
    assert last(session, CachePlan(2, (510,))).cached[0].length == 510
    with pytest.raises(InputError, match="context of 512"), counted(session.model) as passes:
        next(study_cache(session, prompt, CachePlan(2, (511,))))
    assert passes.token_forwards == 0


def test_a_length_that_memory_cannot_hold_is_refused(tmp_path):
    wide = dict(intermediate_size=4096, max_position_embeddings=16_000_001)  # one pass would need 800 GB
    session = Session.open(str(make_tiny_model(tmp_path / "wide", **wide)))
    with pytest.raises(InputError, match=r"16000000 tokens needs at least [\d,]+ bytes"):
        next(study_cache(session, session.prompt("Hi", chat=False), CachePlan(1, (16_000_000,))))


def test_a_model_that_computes_no_numbers_is_a_finding(folder):
    session = Session.open(str(folder))
    session.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FindingError):
        last(session, CachePlan(2))
