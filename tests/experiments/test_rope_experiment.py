"""Rotary positions as the model has them: the table, the law of the distance, and where word order comes from."""

import math
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodescope import Session
from decodescope.errors import InputError
from decodescope.experiments.rope import RopePlan, measure_law, rope_pairs, study_rope
from decodescope.experiments.word_order import TEXTS, compare_orders, counterparts, spell_orders
from decodescope.model.rope import inverse_frequencies, rotary_table
from families import BY_NAME
from tiny_model import make_tiny_model

KINDS = {"qwen2-gqa": "default", "llama-linear": "linear", "llama-llama3": "llama3", "qwen2-yarn": "yarn"}
CAUSAL_ONLY, BLIND = (False, True), (False, False)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """Open sessions of tiny models by family, with a byte tokenizer."""
    root = tmp_path_factory.mktemp("rope")
    plain = make_tiny_model(root / "plain")
    opened: dict[tuple[str, str], Session] = {}

    def session(name: str, dtype: str = "float32", **settings) -> Session:
        key = (f"{name}{sorted(settings.items())}", dtype)
        if key not in opened:
            folder = root / f"{len(opened)}"
            family = BY_NAME[name]
            replace(family, settings={**family.settings, "vocab_size": 260, **settings}).save(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(plain / file, folder)
            opened[key] = Session.open(str(folder), dtype=dtype)
        return opened[key]

    return session


def prompt(session: Session):
    return session.prompt("hello", chat=False)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("position", [0, 1, 37, 4000])
def test_angles_cosines_and_sines_are_those_of_the_models_table(sessions, name, position):
    model = sessions(name).model
    pairs = rope_pairs(model, position)
    positions = torch.tensor([[position]])
    cos, sin = rotary_table(model.rope_frequencies, positions, model.rope_factor, torch.float32)
    assert [pair.cos for pair in pairs] == cos[0, 0, 0, : len(pairs)].tolist()
    assert [pair.sin for pair in pairs] == sin[0, 0, 0, : len(pairs)].tolist()
    for i, pair in enumerate(pairs):
        assert (pair.pair, pair.first, pair.second) == (i, i, i + model.config.head_dim // 2)
        assert math.isclose(pair.angle_radians, position * pair.frequency, rel_tol=1e-6)
        assert math.isclose(pair.turns * pair.wavelength_tokens, position, rel_tol=1e-6)
        assert math.isclose(pair.cos, model.rope_factor * math.cos(pair.angle_radians), abs_tol=1e-6)
        assert math.isclose(pair.sin, model.rope_factor * math.sin(math.tau * pair.turn), abs_tol=1e-3)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_what_the_scaling_changed_is_told_pair_by_pair(sessions, name, kind):
    session = sessions(name)
    report = study_rope(session, prompt(session), RopePlan())
    plain = [report.theta ** (-2 * i / report.head_dim) for i in range(report.head_dim // 2)]
    assert report.kind == kind
    assert [pair.plain_frequency for pair in report.pairs] == pytest.approx(plain, rel=1e-6)
    assert [pair.frequency * pair.slowed for pair in report.pairs] == pytest.approx(plain, rel=1e-6)
    frequencies, factor = inverse_frequencies(session.model.config.rope, report.head_dim)
    assert [pair.frequency for pair in report.pairs] == frequencies.tolist()
    assert report.attention_factor == factor
    assert report.kept == sum(
        math.isclose(p.frequency, q, rel_tol=1e-6) for p, q in zip(report.pairs, plain, strict=True)
    )
    expected = {"default": (4, 1.0), "linear": (0, 4.0), "llama3": (1, 8.0), "yarn": (1, 4.0)}[kind]
    assert (report.kept, report.slowed_most) == pytest.approx(expected)
    assert ("factor" in report.settings) == (kind != "default")


@pytest.mark.parametrize("name", [*KINDS, "qwen3-gqa", "qwen2-mqa"])
def test_a_product_depends_on_the_distance_alone(sessions, name):
    session = sessions(name)
    plan = RopePlan(layer=2, head=3)
    law = measure_law(session, prompt(session), plan)
    assert law.holds and law.spread_float64 < 1e-12 * law.norms
    assert law.spread_float64 < law.spread < 1e-4 * law.norms  # float32 angles round, and the report says so
    factor = session.model.rope_factor**2
    assert law.rows[0].products == pytest.approx([law.unrotated * factor] * len(law.starts), abs=1e-4)
    assert max(row.products[0] for row in law.rows) - min(row.products[0] for row in law.rows) > 1000 * law.spread
    assert [len(row.products) for row in law.rows] == [
        sum(n + row.distance < 512 for n in law.starts) for row in law.rows
    ]


@pytest.mark.parametrize("name", ["qwen2-yarn", "qwen3-gqa"])
def test_the_product_is_the_formulas(sessions, name):
    """Pair by pair: (q1 k1 + q2 k2) cos(distance f) + (q1 k2 - q2 k1) sin(distance f), with q and k hooked anew."""
    session, plan = sessions(name), RopePlan(layer=1, head=2)
    law = measure_law(session, prompt(session), plan)
    attention = session.model.model.layers[1].self_attn
    normed = (attention.q_norm, attention.k_norm)
    seen: list[torch.Tensor] = []
    hooks = [part.register_forward_hook(lambda _, __, out: seen.append(out.double())) for part in normed]
    session.model(torch.tensor([prompt(session).ids]))
    for hook in hooks:
        hook.remove()
    q, k = seen[0][0, 2, -1], seen[1][0, law.kv_head, -1]
    (q1, q2), (k1, k2) = q.chunk(2), k.chunk(2)
    for row in law.rows:
        angle = row.distance * session.model.rope_frequencies.double()
        terms = (q1 * k1 + q2 * k2) * angle.cos() + (q1 * k2 - q2 * k1) * angle.sin()
        expected = float(terms.sum()) * session.model.rope_factor**2
        assert row.products[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen2-gqa", "qwen2-yarn", "qwen3-tied-bias", "llama-mqa-tied", "mistral-gqa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_needs_rotation_or_the_mask_and_the_mask_alone_shows_it_a_layer_later(sessions, name, dtype):
    found = compare_orders(sessions(name, dtype))
    seen = {(way.rotation, way.causal): way for way in found.ways}
    assert len(seen) == 4
    blind, masked = seen.pop(BLIND), seen.pop(CAUSAL_ONLY)
    assert blind.last.from_layer is None and blind.others.from_layer is None
    assert max(*blind.last.by_layer, *blind.others.by_layer) < 1e-4
    assert (masked.last.from_layer, masked.others.from_layer) == (2, 1)
    assert masked.last.by_layer[0] < 1e-5 < 1e-3 < masked.last.by_layer[1]
    assert all(way.last.from_layer == way.others.from_layer == 1 for way in seen.values())


def test_in_a_model_of_one_layer_the_mask_alone_shows_no_order_to_the_last_token(sessions):
    found = compare_orders(sessions("qwen2-gqa", num_hidden_layers=1))
    masked = next(way for way in found.ways if (way.rotation, way.causal) == CAUSAL_ONLY)
    assert found.depths == (1,)
    assert masked.last.from_layer is None and masked.others.from_layer == 1


def test_a_window_too_narrow_for_the_prefix_shows_order_at_once(sessions):
    """The set that the last token sees is no longer the same in both orders: the claim is measured, not assumed."""
    found = compare_orders(sessions("mistral-window"))
    masked = next(way for way in found.ways if (way.rotation, way.causal) == CAUSAL_ONLY)
    assert masked.last.from_layer == 1


@pytest.mark.parametrize("name", ["qwen2-yarn", "llama-llama3", "mistral-window"])
def test_with_rotation_and_mask_it_is_the_model_itself(sessions, name):
    session = sessions(name)
    found = compare_orders(session)
    whole = next(way for way in found.ways if way.rotation and way.causal)
    for order, chosen in zip(found.orders, whole.next_token_ids, strict=True):
        assert session.model(torch.tensor([order.token_ids])).argmax() == chosen


def test_both_orders_are_the_same_tokens_and_end_with_the_same_one(sessions):
    session = sessions("qwen2-gqa")
    found = compare_orders(session)
    first, second = (order.token_ids for order in found.orders)
    assert first != second and Counter(first) == Counter(second)
    assert first[-found.fixed :] == second[-found.fixed :] and found.fixed > 0
    texts = ["我打你。", "你打我。"]
    assert [session.tokenizer.decode(ids) for ids in (first, second)] == texts
    assert [order.text for order in found.orders] == texts and not found.by_character


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_stays_as_it_is(sessions, dtype):
    session = sessions("qwen3-gqa", dtype)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    frequencies, logits = session.model.rope_frequencies.clone(), session.model(torch.tensor([[1, 2, 3]]))
    study_rope(session, prompt(session), RopePlan())
    assert all(torch.equal(value, before[name]) for name, value in session.model.state_dict().items())
    assert torch.equal(session.model.rope_frequencies, frequencies)
    assert torch.equal(session.model(torch.tensor([[1, 2, 3]])), logits)


def test_where_a_token_spans_characters_the_orders_go_in_character_by_character():
    known = {"打我": [7], "我": [1], "打": [2], "你": [3], "你打我": [3, 7], "我打你": [1, 2, 3]}
    assert spell_orders(known.__getitem__) == ([[1, 2, 3], [3, 2, 1]], True)
    assert spell_orders(lambda text: list(map(ord, text))) == ([list(map(ord, text)) for text in TEXTS], False)


@given(st.lists(st.integers(0, 4), max_size=9).flatmap(lambda ids: st.tuples(st.just(ids), st.permutations(ids))))
def test_every_place_has_one_counterpart_with_the_same_token(orders):
    first, second = orders
    places = counterparts(first, second)
    assert [second[place] for place in places] == first
    assert sorted(places) == list(range(len(first)))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (RopePlan(position=-1), "position"),
        (RopePlan(position=2**24), "position"),
        (RopePlan(layer=3), "layer 3"),
        (RopePlan(layer=-1), "layer -1"),
        (RopePlan(head=4), "head 4"),
    ],
)
def test_places_that_are_none_are_refused(sessions, plan, named):
    session = sessions("qwen2-gqa")
    with pytest.raises(InputError, match=named):
        study_rope(session, prompt(session), plan)
