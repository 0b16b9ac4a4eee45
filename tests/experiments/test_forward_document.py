"""A walk through the forward pass: what it shows is what was there, and planted faults are seen where they are."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from decodescope import Session
from decodescope.analysis.departure import first_departure
from decodescope.errors import FindingError, InputError
from decodescope.experiments.forward import ForwardPlan, ForwardStudy, chosen_places, read_reference
from decodescope.experiments.forward_records import ForwardReport
from decodescope.model import decoder
from decodescope.model.decoder import CausalLM
from decodescope.observe.recording import Watch
from decodescope.observe.selection import places
from decodescope.options import RunOptions
from decodescope.text.chat import Prompt
from decodescope.trace.site_records import SiteSummary
from tiny_model import make_tiny_model

LAYERS = 9
STREAM = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forward") / "tiny"
    return make_tiny_model(folder, num_hidden_layers=LAYERS, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def session(folder) -> Session:
    return Session.open(str(folder))


@pytest.fixture(scope="module")
def good(session, tmp_path_factory) -> Path:
    """A saved good run."""
    folder = tmp_path_factory.mktemp("good") / "run"
    walk(session, ForwardPlan(steps=3, save=folder))
    return folder


@pytest.fixture
def changed(session) -> Iterator[CausalLM]:
    """The model, to be spoilt in place; mended afterwards."""
    whole = copy.deepcopy(session.model.state_dict())
    frequencies = session.model.rope_frequencies.clone()
    eps = session.model.model.norm.eps
    yield session.model
    session.model.load_state_dict(whole)
    session.model.rope_frequencies.copy_(frequencies)
    for module in session.model.modules():
        if isinstance(module, decoder.RMSNorm):
            module.eps = eps


def prompt(session: Session, text: str = "Hello 春天") -> Prompt:
    return session.prompt(text, chat=False)


def walk(session: Session, plan: ForwardPlan, text: str = "Hello 春天") -> ForwardReport:
    study = ForwardStudy(session, prompt(session, text), plan)
    study.run()
    return study.report()


def against(session: Session, good: Path, **more: object) -> ForwardReport:
    return walk(session, ForwardPlan(steps=3, against=read_reference(good), **more))


def test_every_site_of_every_layer_and_step_is_there_in_the_order_of_computation(session):
    report = walk(session, ForwardPlan(steps=2))
    order = places(session.model.config)
    assert [(s.step, s.site, s.layer) for s in report.sites] == [(step, *p) for step in (0, 1) for p in order]
    assert report.ids == tuple(prompt(session).ids)
    assert [(p.first, p.last) for p in report.steps] == [
        (0, len(report.ids) - 1),
        (len(report.ids), len(report.ids)),
    ]
    assert report.sites[-1].shape == (1, 1, 260) and report.sites[len(order) - 1].shape == (
        1,
        len(report.ids),
        260,
    )
    assert report.first_nonfinite is None and report.reconstruction_error is not None
    assert report.reconstruction_error < 1e-5 and report.finish_reason == "length"


def test_looking_changes_no_token_and_no_logit(session):
    plain = session.run(prompt(session), max_new_tokens=3, every_logit=True)  # the product has the same shape
    report = walk(session, ForwardPlan(steps=3, values=True))
    assert [p.token_id for p in report.steps] == plain.token_ids
    assert [p.prob for p in report.steps] == [step.prob for step in plain.path()]


def test_without_steps_one_token_is_chosen_after_one_pass(session):
    report = walk(session, ForwardPlan())
    assert [p.step for p in report.steps] == [0] and report.steps[0].token_id is not None


@pytest.mark.parametrize("length", [20, 700])
def test_growth_is_that_of_the_tensors_themselves_in_any_number_of_chunks(session, length):
    text = "abcdefg" * (length // 7)
    report = walk(session, ForwardPlan(sites=("logits",)), text)
    with session.observe([f"layers.*.{site}" for site in STREAM], budget_bytes=2**30) as recording:
        session.run(prompt(session, text), max_new_tokens=1)
    assert [change.layer for change in report.growth] == list(range(LAYERS))
    for change in report.growth:
        pre, mid, post, attention, mlp = (
            recording[f"layers.{change.layer}.{site}"][0].double() for site in STREAM
        )
        cosine = torch.cosine_similarity(pre, post, dim=-1)
        assert change.growth == pytest.approx(float((post.norm(dim=-1) / pre.norm(dim=-1)).median()), rel=1e-9)
        assert change.cosine == pytest.approx(float(cosine.median()), rel=1e-9)
        assert change.attention_ratio == pytest.approx(float((attention.norm(dim=-1) / pre.norm(dim=-1)).median()))
        assert change.mlp_ratio == pytest.approx(float((mlp.norm(dim=-1) / mid.norm(dim=-1)).median()))


@pytest.mark.parametrize("length", [3, 700])
def test_the_corners_shown_are_those_of_the_tensors(session, length):
    shown = ("embed", "q_rot", "scores", "pattern", "gate", "logits")
    text = "x" * length
    report = walk(session, ForwardPlan(sites=shown, layers=("1",), values=True), text)
    with session.observe(["embed", *(f"layers.1.{site}" for site in shown[1:5])], budget_bytes=2**30) as recording:
        session.run(prompt(session, text), max_new_tokens=1)
    assert [edges.site for edges in report.values] == list(shown)
    for edges in report.values[:-1]:
        name = edges.site if edges.layer is None else f"layers.{edges.layer}.{edges.site}"
        whole = recording[name][0]
        heads = [(0,), (len(whole) - 1,)] if whole.ndim == 3 else [()]
        assert [row.index for row in edges.rows] == [(*head, row) for head in heads for row in (0, length - 1)]
        for row in edges.rows:
            numbers = whole[row.index].tolist()
            assert list(row.head) == pytest.approx(numbers[: len(row.head)], rel=1e-4, abs=1e-6)
            assert list(row.tail) == pytest.approx(numbers[len(numbers) - len(row.tail) :], rel=1e-4, abs=1e-6)
            assert len(row.head) == min(3, len(numbers)) or not row.tail


def test_time_and_memory_of_every_layer_are_measured(session):
    report = walk(session, ForwardPlan(steps=2))
    assert [(c.step, c.layer) for c in report.layers] == [
        (s, layer) for s in (0, 1) for layer in (*range(LAYERS), None)
    ]
    assert all(0 < cost.seconds < 60 and cost.memory.rss_bytes > 2**20 for cost in report.layers)


@pytest.mark.parametrize(
    ("sites", "layers", "chosen"),
    [
        ((), ("3",), 18),
        (("q", "k"), (), 2 * LAYERS),
        (("layers.*.resid_*", "embed"), ("0", "-1"), 7),
        (("logits",), ("2",), 1),
        (("*",), (), 18 * LAYERS + 3),
    ],
)
def test_patterns_and_layers_choose_together(session, sites, layers, chosen):
    found = chosen_places(session.model.config, sites, layers)
    assert len(found) == chosen
    assert list(found) == sorted(found, key=places(session.model.config).index)


def test_what_names_nothing_is_refused(session):
    with pytest.raises(InputError, match="loosen"):
        chosen_places(session.model.config, ("layers.1.q",), ("3",))
    for plan in (
        ForwardPlan(sites=("nothing",)),
        ForwardPlan(layers=("99",)),
        ForwardPlan(keep=("no",), save=Path("x")),
    ):
        with pytest.raises(InputError):
            ForwardStudy(session, prompt(session), plan)
    assert not Path("x").exists()


def test_kept_tensors_lie_in_the_run_folder_and_what_does_not_fit_is_listed(session, tmp_path):
    report = walk(
        session, ForwardPlan(steps=2, keep=("layers.0.q", "logits"), budget_bytes=15_000, save=tmp_path / "run")
    )
    assert {tensor.name for tensor in report.kept} == {"layers.0.q", "logits"}
    assert sum(tensor.bytes for tensor in report.kept) == report.kept_bytes <= 15_000
    assert all((tmp_path / "run" / tensor.file).is_file() for tensor in report.kept)
    less = walk(session, ForwardPlan(keep=("layers.0.q", "logits"), budget_bytes=1_600, save=tmp_path / "less"))
    assert [(gone.site, gone.layer) for gone in less.dropped] == [("logits", None)]


# --- beside a good run ------------------------------------------------------------------------------------------


def test_a_run_against_itself_departs_nowhere(session, good, all_threads):
    report = against(session, good)
    assert report.against is not None and not report.against.departs
    assert report.against.compared == 3 * (18 * LAYERS + 3) and report.against.missing == 0
    assert report.against.largest_distance < 1e-6 and report.against.differences == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_long_pass_and_chunks_with_a_cache_depart_nowhere(folder, dtype):
    session = Session.open(str(folder), dtype=dtype)
    seen = [fingerprints(session, use_cache) for use_cache in (True, False)]
    departure, _ = first_departure(
        list(zip(*seen, strict=True)), {"float32": 1e-4, "float16": 8e-3}.get(dtype, 5e-2)
    )
    assert departure is None


def fingerprints(session: Session, use_cache: bool) -> list[SiteSummary]:
    with session.watching(Watch(summarise=["*"])) as recording:
        options = RunOptions(max_new_tokens=1, use_cache=use_cache, every_logit=True)
        for _ in session.start([prompt(session, "abcdefg" * 100)], options).steps():
            pass
    return recording.summaries


def test_the_same_weights_in_16_bits_depart_nowhere_and_say_so(folder, good):
    report = against(Session.open(str(folder), dtype="bfloat16"), good)
    assert report.against is not None and report.against.departure is None
    assert [(d.name, d.here, d.there) for d in report.against.differences] == [("dtype", "bfloat16", "float32")]


def nan_in_up(model: CausalLM) -> None:
    model.model.layers[7].mlp.up_proj.weight[5] = torch.nan


def head_times_ten(model: CausalLM) -> None:
    model.model.layers[4].self_attn.o_proj.weight[:, 8:16] *= 10


def value_head_times_ten(model: CausalLM) -> None:
    model.model.layers[2].self_attn.v_proj.weight[8:] *= 10
    model.model.layers[2].self_attn.v_proj.bias[8:] *= 10


def swapped_keys(model: CausalLM) -> None:
    _swap_heads(model.model.layers[3].self_attn.k_proj)


def swapped_values(model: CausalLM) -> None:
    _swap_heads(model.model.layers[5].self_attn.v_proj)


def _swap_heads(projection: torch.nn.Linear) -> None:
    order = torch.arange(16).roll(8)
    projection.weight.copy_(projection.weight[order])
    projection.bias.copy_(projection.bias[order])


def wrong_eps(model: CausalLM) -> None:
    model.model.layers[6].post_attention_layernorm.eps = 1e-3


def wrong_theta(model: CausalLM) -> None:
    model.rope_frequencies.mul_(0.9)


def wrong_last_norm(model: CausalLM) -> None:
    model.model.norm.weight[3] *= 1.5


FAULTS = [
    (nan_in_up, 7, "up", "nonfinite"),
    (head_times_ten, 4, "attn_out", None),
    (value_head_times_ten, 2, "v", None),
    (swapped_keys, 3, "k", "signature"),
    (swapped_values, 5, "v", "signature"),
    (wrong_eps, 6, "mlp_norm", None),
    (wrong_theta, 0, "q_rot", None),
    (wrong_last_norm, None, "final_norm", None),
]


@pytest.mark.parametrize(
    ("spoil", "layer", "site", "figure"), FAULTS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_planted_fault_is_seen_where_it_is(
    session, changed, good, spoil: Callable[[CausalLM], None], layer, site, figure
):
    with torch.inference_mode():
        spoil(changed)
    study = ForwardStudy(session, prompt(session), ForwardPlan(steps=3, against=read_reference(good)))
    try:
        study.run()
    except FindingError:
        assert spoil is nan_in_up
    departure = study.report().departure
    assert departure is not None and (departure.step, departure.layer, departure.site) == (0, layer, site)
    assert figure in (None, departure.figure)


def test_positions_shifted_by_one_are_seen_in_the_first_rotation(session, good, monkeypatch):
    shifted = decoder._positions
    monkeypatch.setattr(decoder, "_positions", lambda *given: shifted(*given) + 1)
    departure = against(session, good).departure
    assert departure is not None and (departure.layer, departure.site) == (0, "q_rot")


def test_a_wrong_eps_in_the_configuration_is_seen_in_the_first_norm(folder, good, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": config["rms_norm_eps"] * 100}))
    report = against(Session.open(str(other)), good)
    assert report.departure is not None and (report.departure.layer, report.departure.site) == (0, "attn_norm")
    assert report.against is not None and report.against.differences[0].name == "model"


@pytest.mark.parametrize("spoil", [head_times_ten, swapped_keys, swapped_values])
def test_the_coarse_tolerance_of_16_bits_sees_the_layer_and_a_finer_one_the_site(folder, tmp_path, spoil):
    session = Session.open(str(folder), dtype="bfloat16")
    walk(session, ForwardPlan(steps=3, save=tmp_path / "good"))
    with torch.inference_mode():
        spoil(session.model)
    layer, site = next((layer, site) for fault, layer, site, _ in FAULTS if fault is spoil)
    coarse, fine = (against(session, tmp_path / "good", tolerance=each).departure for each in (None, 1e-3))
    assert coarse is not None and coarse.layer == layer
    assert fine is not None and (fine.layer, fine.site) == (layer, site)


def test_the_first_broken_number_is_named_although_nothing_could_be_chosen(session, changed, tmp_path):
    with torch.inference_mode():
        nan_in_up(changed)
    study = ForwardStudy(session, prompt(session), ForwardPlan(save=tmp_path / "run"))
    with pytest.raises(FindingError):
        study.run()
    report = study.report()
    broken = report.first_nonfinite
    assert broken is not None and (broken.layer, broken.site, broken.position) == (7, "up", 0)
    assert broken.index == (5,) and broken.value == "nan" and report.token_at(broken.position) == "H"
    assert broken.source == "mlp_norm" and broken.before is not None and 0 < broken.before < 1e3
    assert report.steps[0].token_id is None and len(report.sites) == 18 * LAYERS + 3
    assert len(read_reference(tmp_path / "run").seen.sites) == 18 * LAYERS + 3


def test_an_interrupted_walk_reports_the_steps_that_were_made(session):
    class Stop(Exception):
        pass

    study = ForwardStudy(session, prompt(session), ForwardPlan(steps=50))
    before = session.model.model.layers[0].forward
    passes = []

    def forward(*given: object) -> torch.Tensor:
        passes.append(given)
        if len(passes) == 4:
            raise Stop
        return before(*given)

    session.model.model.layers[0].forward = forward
    try:
        with pytest.raises(Stop):
            study.run()
    finally:
        del session.model.model.layers[0].forward
    report = study.report()
    assert [p.step for p in report.steps] == [0, 1, 2] == sorted({site.step for site in report.sites})


def test_a_run_without_sites_cannot_be_compared_with(session, tmp_path):
    session.run(prompt(session), max_new_tokens=1, save=tmp_path / "plain")
    with pytest.raises(InputError, match="--save DIR"):
        read_reference(tmp_path / "plain")


def test_the_real_starter_departs_where_it_was_spoilt_and_nowhere_else(starter_path, tmp_path, all_threads):
    session = Session.open(str(starter_path), dtype="float32")  # blocks could not be spoilt column by column
    ready = session.prompt("我打你")
    plan = ForwardPlan(save=tmp_path / "good", layers=("0-3",), sites=("layers.*", "embed"))
    study = ForwardStudy(session, ready, plan)
    study.run()
    torch.set_num_threads(1)
    beside = ForwardPlan(against=read_reference(tmp_path / "good"), layers=plan.layers, sites=plan.sites)
    for spoil, expected in ((None, None), (_starter_head, (2, "attn_out")), (_starter_eps, (0, "attn_norm"))):
        if spoil is not None:
            with torch.inference_mode():
                spoil(session.model)
        study = ForwardStudy(session, ready, beside)
        study.run()
        departure = study.report().departure
        assert (departure and (departure.layer, departure.site)) == expected


def _starter_head(model: CausalLM) -> None:
    model.model.layers[2].self_attn.o_proj.weight[:, 64:128] *= 10


def _starter_eps(model: CausalLM) -> None:
    model.model.layers[0].input_layernorm.eps = 1e-5
