"""A tiny session, and engines on it that are closed again."""

from collections.abc import Callable, Iterator

import pytest
from serving_parts import Diary

from decodescope.serving.engine import Engine
from decodescope.serving.orders import Plan
from decodescope.session import Session
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("served"))))


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def serve(session: Session, diary: Diary) -> Iterator[Callable[..., Engine]]:
    """Start an engine: `serve(most_running=2)`."""
    started: list[Engine] = []

    def start(archive=None, of: Session = session, **plan) -> Engine:
        engine = Engine(of, Plan(**{"cache_bytes": 1 << 22, **plan}), [diary], archive)
        engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()
