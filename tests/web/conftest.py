"""A tiny model served for real."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_web import Live, serving

from decodescope.serving.archive import Archive
from decodescope.serving.orders import Plan
from decodescope.session import Session
from decodescope.web.serve import Service
from tiny_model import make_tiny_model

CONTEXT = 1 << 17  # so long that an answer of this length outlasts every test


@pytest.fixture(scope="session")
def tiny_session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return Session.open(str(make_tiny_model(folder, max_position_embeddings=CONTEXT)), threads=1)


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return Archive(tmp_path_factory.mktemp("runs"), "all", 1 << 30)


@pytest.fixture(scope="session")
def live(tiny_session: Session, archive: Archive) -> Iterator[Live]:
    """One server for all tests that leave it idle."""
    with serving(tiny_session, Service(Plan(1 << 28), archive)) as running:
        yield running


@pytest.fixture
def small(tiny_session: Session) -> Iterator[Live]:
    """A server with one place and a queue of one."""
    with serving(tiny_session, Service(Plan(1 << 28, most_running=1, most_waiting=1))) as running:
        yield running


@pytest.fixture
def runs_folder(archive: Archive) -> Path:
    return archive.path
