"""What all tests share: the real models, and tiny random ones of every family."""

import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: a busy machine must not slow the tests down

import pytest
import torch
import transformers

from decodescope.errors import InputError
from decodescope.locale import set_language
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.models import find_model
from families import FAMILIES, Family

os.environ["LC_ALL"] = "C.UTF-8"  # English, whatever the developer speaks
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def english():
    set_language("en")
    yield
    set_language(None)


def _model_here(name: str) -> Path:
    try:
        return find_model(name, download=False).path
    except InputError as fault:
        pytest.skip(f"{name} could not be had by `make models`; ends when a source offers it again ({fault})")


@pytest.fixture(scope="session")
def starter_path() -> Path:
    return _model_here("starter")


@pytest.fixture(scope="session")
def small_path() -> Path:
    return _model_here("starter-small")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        family.save(root / family.name)
    return {family.name: root / family.name for family in FAMILIES}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def pair(family: Family, tiny_folders: dict[str, Path]) -> tuple[CausalLM, transformers.PreTrainedModel]:
    """The same tiny weights in our model and in transformers'."""
    ours, _ = load_model(tiny_folders[family.name])
    return ours, family.reference()


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from a second thread, and lose much where another process is busy."""
    torch.set_num_threads(1)


@pytest.fixture
def all_threads(one_thread: None):
    torch.set_num_threads(os.cpu_count() or 1)
