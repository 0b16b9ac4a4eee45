"""What is new of a run that is being written: the same steps as in the whole, without those before."""

import pytest

from decodescope.session import Session
from decodescope.trace.saved import read_steps, read_trace
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("tails")
    session = Session.open(str(make_tiny_model(root / "tiny")), threads=1)
    options = dict(temperature=0.9, top_k=5, seed=3, max_new_tokens=9, ignore_eos=True, stage_probs=True)
    trace = session.run("abab", save=root / "run", guards=("entropy=9:warn,window=2",), **options)
    session.fork(trace, 4, 66, max_new_tokens=3)
    return root / "run"


@pytest.mark.parametrize("first", [0, 1, 5, 8, 11, 12, 99])
def test_a_tail_is_the_rest_of_the_whole(saved, first):
    whole = read_trace(saved).steps
    assert len(whole) == 12 and any(step.interventions for step in whole)
    assert read_steps(saved, first) == whole[first:]
