"""The whole package with a model that lies elsewhere, on one device or spread over two: what it tells is the same.

The devices are pretended (see `pretend_devices`): they refuse what a real one refuses, and compute the same bits.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decodescope import Session
from decodescope.experiments.attention import AttentionPlan, study_attention
from decodescope.experiments.cache_curve import CachePlan, study_cache
from decodescope.experiments.forks import Forking, ForkStudy
from decodescope.experiments.forward import ForwardPlan, ForwardStudy
from decodescope.experiments.lens import LensPlan, study_lens
from decodescope.experiments.rope import RopePlan
from decodescope.experiments.sample import SideBySide
from decodescope.experiments.sample_grid import parse_grid
from decodescope.options import RunOptions
from decodescope.trace.lines import document_text
from pretend_devices import pretend_devices
from tiny_model import make_tiny_model

TEXT = "A river runs."
# What may differ: where a model lies, how long it took, memory of the machine (and of what is pretended).
_OWN = {
    "device",
    "seconds",
    "memory",
    "fit",
    "timing",
    "seconds_ratio",
    "repeats_seconds",
    "ttft_s",
    "decode_tokens_per_s",
    "allocated_bytes",
}

Study = Callable[[Session], Any]


def run(session: Session) -> Any:
    recorded = session.run(TEXT, temperature=0.8, top_p=0.9, seed=3, max_new_tokens=6, ignore_eos=True)
    return [recorded.steps, recorded.text]


def batch(session: Session) -> Any:
    options = RunOptions(max_new_tokens=5, ignore_eos=True)
    live = session.start([session.prompt(text) for text in (TEXT, "no", "three words only")], options)
    return [step for _, step in live.steps()]


def forward(session: Session) -> Any:
    plan = ForwardPlan(steps=2, values=True, rope=RopePlan())
    study = ForwardStudy(session, session.prompt(TEXT), plan)
    study.run()
    return study.report()


def kept(session: Session) -> Any:
    with session.observe(["*"], steps=[0, 2]) as recording:
        session.run(TEXT, max_new_tokens=3, ignore_eos=True)
    places = recording.kept.places()
    return {
        str(place): {step: each.tolist() for step, each in recording.kept.tensors(place).items()}
        for place in places
    }


def lens(session: Session) -> Any:
    return study_lens(session, session.prompt(TEXT), LensPlan(("all",), steps=2))


def attention(session: Session) -> Any:
    return study_attention(session, session.prompt(TEXT), AttentionPlan(positions=("all",), steps=2)).report


def cache(session: Session) -> Any:
    return list(study_cache(session, session.prompt(TEXT), CachePlan(3, (4, 9))))


def sample(session: Session) -> Any:
    grid = parse_grid(["temperature=0,1.5"], "1,2")
    rows = SideBySide(session, session.prompt(TEXT), grid, RunOptions(max_new_tokens=5))
    list(rows.steps())
    return rows.report()


def forks(session: Session) -> Any:
    study = ForkStudy(session, session.run(TEXT, max_new_tokens=6), Forking(3, branches=3, verify=True))
    study.run()
    return study.report()


STUDIES: list[Study] = [run, batch, forward, kept, lens, attention, cache, sample, forks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def here(folder: Path) -> Session:
    return Session.open(str(folder))


@contextmanager
def elsewhere(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with pretend_devices(count, monkeypatch):
        yield Session.open(str(folder), device="auto")


def plain(thing: Any) -> Any:
    """As a document, without what may differ."""
    if isinstance(thing, list):
        return [plain(each) for each in thing]
    return thing if isinstance(thing, str | dict) else _without(json.loads(document_text(thing)))


def _without(document: Any) -> Any:
    if isinstance(document, dict):
        return {key: _without(value) for key, value in document.items() if key not in _OWN}
    return [_without(each) for each in document] if isinstance(document, list) else document


@pytest.mark.parametrize(("study", "count"), [*((study, 2) for study in STUDIES), (run, 1), (lens, 1)])
def test_a_study_tells_the_same_wherever_the_model_lies(here, folder, monkeypatch, study, count):
    expected = plain(study(here))
    with elsewhere(count, folder, monkeypatch) as there:
        assert plain(study(there)) == expected


def test_a_run_tells_all_its_devices_and_what_is_held_on_them(folder, monkeypatch):
    with elsewhere(2, folder, monkeypatch) as there:
        recorded = there.run(TEXT, max_new_tokens=2)
        assert recorded.run.device == "pretend:0, pretend:1"
        assert {step.memory.device_bytes for step in recorded.steps} == {1000 + 1001}
        study = ForwardStudy(there, there.prompt(TEXT), ForwardPlan())
        study.run()
        assert [cost.memory.device_bytes for cost in study.report().layers] == [1000, 1001, 1001]
        *_, report = study_cache(there, there.prompt(TEXT), CachePlan(2))
        assert [layer.device for layer in report.layers] == ["pretend:0", "pretend:1"]
        assert report.fit.memory_available_bytes >= 2 << 30
