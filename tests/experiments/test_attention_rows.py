"""Rows of attention as the run had them: whatever the family, the chunks, the batch; and within bounded memory."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from decodescope import Session
from decodescope.analysis.attention import row_figures
from decodescope.errors import InputError
from decodescope.experiments.attention import MOST_WEIGHTS, Attention, AttentionPlan, study_attention
from decodescope.experiments.attention_reading import Asked, AttentionReading
from decodescope.experiments.attention_records import Grid, Span, spans_of
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.probe import Attended, attention_pattern
from families import BY_NAME, FAMILIES, VOCABULARY
from tiny_model import make_tiny_model

LAYERS, HEADS = 3, 4  # of every tiny family
LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}


def some_ids(length: int, seed: int = 3) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(model: CausalLM, ids: Sequence[int], rows: Sequence[int], chunk: int = 512) -> AttentionReading:
    """Read rows of a pass over a prompt, in chunks as a run does it."""
    config = model.config
    asked = Asked(
        tuple(range(config.num_hidden_layers)), tuple(range(config.num_attention_heads)), tuple(rows), 256, True
    )
    reading, cache = AttentionReading(asked, ids), KVCache(config.num_hidden_layers)
    for start in range(0, len(ids), chunk):
        model(torch.tensor([ids[start : start + chunk]]), cache, tap=reading)
    return reading


def triangle(reading: AttentionReading, layer: int, length: int) -> torch.Tensor:
    """All rows of one layer as [H, T, T], 0 where nothing is visible."""
    rows = reading.layers[0, layer].rows
    assert [row.shape[1] for row in rows] == list(range(1, length + 1))
    return torch.stack([torch.nn.functional.pad(row, (0, length - row.shape[1])) for row in rows], dim=1)


@pytest.mark.parametrize("dtype", LIMIT)
def test_the_layers_own_outputs_come_back_in_every_family(family, tiny_folders, dtype):
    model, _ = load_model(tiny_folders[family.name], dtype)
    reading = read(model, some_ids(20), range(20), chunk=7)
    errors = [found.error for found in reading.layers.values()]
    assert len(errors) == LAYERS and 0 <= max(errors) < LIMIT[dtype]
    single = read(model, some_ids(20), [19])
    assert max(found.error for found in single.layers.values()) < LIMIT[dtype]


@pytest.mark.parametrize("name", ["qwen2-gqa", "mistral-window", "qwen2-window", "qwen3-gqa"])
def test_rows_are_those_of_transformers_eager_attention(name, tiny_folders):
    model, _ = load_model(tiny_folders[name])
    reference = BY_NAME[name].reference()
    reference.set_attn_implementation("eager")
    ids = some_ids(17)
    theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
    reading = read(model, ids, range(17), chunk=6)
    for layer in range(LAYERS):
        ours = triangle(reading, layer, 17)
        assert (ours - theirs[layer][0]).norm() / theirs[layer].norm() < 1e-5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name, indirect=True)
def test_a_row_sees_what_came_before_within_its_window_and_nothing_else(family, tiny_folders):
    model, _ = load_model(tiny_folders[family.name])
    reading = read(model, some_ids(19), range(19), chunk=8)
    for layer in range(LAYERS):
        window = model.config.window(layer)
        for position, row in enumerate(reading.layers[0, layer].rows):
            assert torch.allclose(row.sum(-1), torch.ones(HEADS), atol=1e-5)
            first = 0 if window is None else max(position - window + 1, 0)
            assert not row[:, :first].any() and bool((row[:, first:] > 0).all())
        grid = reading.grids[layer].values()
        visible = ~grid[0].isnan()
        expected = torch.ones(19, 19).tril() > 0
        if window is not None:
            expected &= torch.ones(19, 19).triu(1 - window) > 0
        assert torch.equal(visible, expected)


class Patterns:
    """A tap that keeps the whole pattern of every layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, torch.Tensor] = {}

    def wants(self, site: str, layer: int | None) -> bool:
        return site == "pattern"

    def receive(self, site: str, layer: int, value: Attended) -> None:
        self.by_layer[layer] = attention_pattern(value.scores(slice(None)))


@pytest.mark.parametrize("name", ["qwen2-gqa", "qwen2-window", "mistral-window", "llama-mqa-tied"])
def test_padding_gets_nothing_and_changes_nothing(name, tiny_folders):
    model, _ = load_model(tiny_folders[name])
    short, long = some_ids(6), some_ids(11, seed=4)
    padding, alone, together = len(long) - len(short), Patterns(), Patterns()
    model(torch.tensor([short]), tap=alone)
    batch = torch.tensor([[0] * padding + short, long])
    model(batch, padding=torch.tensor([padding, 0]), tap=together)
    for layer in range(LAYERS):
        padded = together.by_layer[layer][0, :, padding:]
        assert not padded[:, :, :padding].any()
        cut, single = padded[:, :, padding:], alone.by_layer[layer][0]
        assert torch.allclose(cut, single, atol=1e-6)
        positions, ids = torch.arange(len(short)), torch.tensor(short)
        pair = (row_figures(pattern, positions, ids) for pattern in (cut, single))
        assert torch.allclose(*pair, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2-gqa", "mistral-window"])
def test_chunks_and_choice_of_rows_change_no_row(name, tiny_folders):
    model, _ = load_model(tiny_folders[name])
    ids = some_ids(40)
    whole, parts = read(model, ids, range(40)), read(model, ids, [0, 1, 5, 6, 7, 23, 38, 39], chunk=9)
    for layer in range(LAYERS):
        found = parts.layers[0, layer]
        assert found.positions == [0, 1, 5, 6, 7, 23, 38, 39]
        for position, row in zip(found.positions, found.rows, strict=True):
            assert torch.allclose(row, whole.layers[0, layer].rows[position], atol=1e-6)
    errors = [found.error for reading in (whole, parts) for found in reading.layers.values()]
    assert max(errors) < 1e-5


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("attention") / "qwen2", eos_token_id=250)))


def study(session: Session, plan: AttentionPlan, text: str = "so much depends upon so much") -> Attention:
    return study_attention(session, session.prompt(text, chat=False), plan)


def test_without_being_asked_it_looks_at_the_last_position_and_generates_nothing(session):
    found = study(session, AttentionPlan())
    report, length = found.report, len("so much depends upon so much")
    assert len(report.tokens) == report.prompt_tokens == length
    assert [(h.step, h.layer, h.head, h.kv_head) for h in report.heads] == [
        (0, layer, head, head // 2) for layer in range(2) for head in range(4)
    ]
    for head in report.heads:
        assert head.positions == (length - 1,) and [len(row) for row in head.rows] == [length]
        assert head.sink_share == head.rows[0][0] and head.self_share == head.rows[0][-1]
        assert head.previous_share == head.rows[0][-2]
        assert head.top_share == max(head.rows[0]) == head.rows[0][head.top_position]
    assert found.grid.values.shape == (2, 4, 1, length)
    assert report.reconstruction_error == max(layer.reconstruction_error for layer in report.layers) < 1e-5


def test_every_step_adds_the_row_of_its_pass_with_the_columns_cached_for_it(session):
    found = study(session, AttentionPlan(steps=5))
    report = found.report
    trace = session.run(session.prompt("so much depends upon so much", chat=False), max_new_tokens=5)
    assert [token.token_id for token in report.tokens[report.prompt_tokens :]] == trace.token_ids
    assert [token.step for token in report.tokens[report.prompt_tokens :]] == [0, 1, 2, 3, 4]
    for head in report.heads:
        cached = trace.steps[head.step].kv.tokens
        assert head.positions == (cached - 1,) and [len(row) for row in head.rows] == [cached]
    ids = [token.token_id for token in report.tokens][:-1]
    forced = read(session.model, ids, range(report.prompt_tokens - 1, len(ids)))
    for head in report.heads:
        row = forced.layers[0, head.layer].rows[head.step][head.head]
        assert np.allclose(head.rows[0], row, atol=1e-6)
        assert np.allclose(found.grid.values[head.layer, head.head, head.step, : len(row)], row, atol=1e-6)


def test_an_early_end_leaves_rows_and_columns_out(tmp_path):
    first = Session.open(str(make_tiny_model(tmp_path / "first")))
    prompt = first.prompt("so much", chat=False)
    chosen = first.run(prompt, max_new_tokens=9, ignore_eos=True).token_ids
    stop = next(step for step in range(1, 9) if chosen[step] not in chosen[:step])
    model = make_tiny_model(tmp_path / "second", eos_token_id=chosen[stop])
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {chosen[stop]}}}')
    found = study(Session.open(str(model)), AttentionPlan(steps=9), "so much")
    assert [token.token_id for token in found.report.tokens[7:]] == chosen[: stop + 1]
    assert found.grid.rows[-1] == found.grid.columns[-1] == Span(7 + stop - 1, 7 + stop - 1)
    assert found.grid.values.shape == (2, 4, stop + 1, 7 + stop)
    assert {head.step for head in found.report.heads} == set(range(stop + 1))


def test_words_choose_layers_heads_and_positions(session):
    report = study(session, AttentionPlan(["-1"], ["0", "2-3"], ["0-2,-1"])).report
    assert {head.layer for head in report.heads} == {1}
    assert [head.head for head in report.heads] == [0, 2, 3]
    assert {head.positions for head in report.heads} == {(0, 1, 2, 27)}
    assert [[len(row) for row in head.rows] for head in report.heads] == [[1, 2, 3, 28]] * 3


def test_figures_are_means_over_the_rows_and_the_rows_need_not_be_kept(session):
    kept = study(session, AttentionPlan(positions=["all"]))
    bare = study(session, AttentionPlan(positions=["all"], keep_rows=False))
    for with_rows, without in zip(kept.report.heads, bare.report.heads, strict=True):
        assert without.rows == () and len(with_rows.rows) == 28
        assert without.entropy_nats == with_rows.entropy_nats
        assert without.sink_share == pytest.approx(np.mean([row[0] for row in with_rows.rows]))
        assert without.previous_share == pytest.approx(np.mean([row[-2] for row in with_rows.rows[1:]]))
    assert np.array_equal(kept.grid.values, bare.grid.values, equal_nan=True)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (AttentionPlan(heads=["4"]), "query head"),
        (AttentionPlan(heads=["-5"]), "query head"),
        (AttentionPlan(heads=["x"]), "query head"),
        (AttentionPlan(layers=["2"]), "no layer 2"),
        (AttentionPlan(positions=["28"]), "position"),
        (AttentionPlan(positions=["3-1"]), "position"),
    ],
)
def test_what_the_model_or_the_prompt_lacks_is_refused(session, plan, word):
    with pytest.raises(InputError, match=word):
        study(session, plan)


def test_fewer_than_no_steps_are_refused():
    with pytest.raises(InputError, match="--steps"):
        AttentionPlan(steps=-1)


def test_more_rows_than_a_document_holds_are_refused_before_the_pass(tmp_path):
    session = Session.open(str(make_tiny_model(tmp_path / "long", max_position_embeddings=2000)))
    with pytest.raises(InputError, match=f"{MOST_WEIGHTS}"):
        study(session, AttentionPlan(positions=["all"]), "x" * 1500)
    one = study(session, AttentionPlan(["0"], ["0"], ["all"], keep_rows=False), "x" * 1500)
    assert one.grid.pooled == (6, 6) and one.grid.values.shape == (1, 1, 250, 250)


def test_a_grid_made_smaller_keeps_the_largest():
    values = np.array([[[[1.0, np.nan, np.nan], [0.25, 0.75, np.nan], [0.5, 0.0, 0.5]]]], dtype=np.float32)
    grid = Grid((0,), (0,), spans_of([4, 5, 6], 1), spans_of([0, 1, 2], 1), values, (1, 1))
    small = grid.within(2, 2)
    assert small.values.tolist()[0][0][0][0] == 1.0 and np.isnan(small.values[0, 0, 0, 1])
    assert small.values[0, 0, 1].tolist() == [0.5, 0.5]
    assert small.rows == (Span(4, 5), Span(6, 6)) and small.columns == (Span(0, 1), Span(2, 2))
    assert small.pooled == (2, 2) and small.row_of(5) == 0
    assert np.array_equal(grid.within(9, 9).values, values, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_the_real_starters_outputs_come_back_from_single_rows(starter_path, dtype):
    """Its scores reach 1,500: a lone row, were it computed alone, would round otherwise, by up to 1e-5."""
    session = Session.open(str(starter_path), dtype=dtype)
    for text, chat in (
        ("春天来了，花园里的花都开了。", True),
        ("Once upon a time there was a little girl", False),
    ):
        found = study_attention(session, session.prompt(text, chat=chat), AttentionPlan(steps=3))
        assert 0 < found.report.reconstruction_error < (1e-6 if dtype == "float32" else 2e-2)


LONG = """
import resource, sys
from decodescope import Session
from decodescope.experiments.attention import AttentionPlan, study_attention

session = Session.open(sys.argv[1], threads=1)
prompt = session.prompt("depends upon " * 630, chat=False)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
session.run(prompt, max_new_tokens=1)
before = peak()
found = study_attention(session, prompt, AttentionPlan(positions=["all"], keep_rows=False))
assert found.grid.values.shape == (2, 2, 128, 128) and found.report.reconstruction_error < 1e-5
print(len(prompt.tokens), peak() - before)
"""


def test_eight_thousand_tokens_fit_into_two_hundred_megabytes(tmp_path):
    """Both layers, all heads and rows: one layer's [H, T, T] alone would take 512."""
    shape = dict(max_position_embeddings=8200, num_attention_heads=2, num_key_value_heads=1)
    model = make_tiny_model(tmp_path / "long", **shape)
    done = subprocess.run([sys.executable, "-c", LONG, model], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens, megabytes = map(int, done.stdout.split())
    assert tokens == 8190 and megabytes < 200
