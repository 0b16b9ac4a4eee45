"""Runs that fail while a client waits: it is told what the trace says, in whatever form it waits."""

import openai
import pytest
from live_web import Live, serving

from decodescope.serving.orders import Plan
from decodescope.session import Session
from decodescope.web.serve import Service
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    session = Session.open(str(make_tiny_model(tmp_path_factory.mktemp("broken") / "tiny")), threads=1)
    session.model.model.norm.weight.data.fill_(float("nan"))
    with serving(session, Service(Plan(1 << 16))) as running:
        yield running


def asking(live: Live, **more):
    return live.openai().completions.create(model=live.served.model_name, prompt="x", max_tokens=4, **more)


def test_a_whole_answer_is_an_error(broken):
    with pytest.raises(openai.InternalServerError, match="NaN"):
        asking(broken)


def test_a_stream_ends_with_the_error(broken):
    with pytest.raises(openai.APIError, match="NaN"):
        list(asking(broken, stream=True))


def test_the_metrics_tell_of_it(broken):
    with pytest.raises(openai.InternalServerError):
        asking(broken)
    broken.wait_idle()
    with broken.http() as http:
        text = http.get("metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("decodescope_nonfinite_logits_total{")]
    assert float(line.split()[-1]) >= 1


def test_a_request_that_the_cache_cannot_hold_is_refused_before_work(broken):
    with pytest.raises(openai.BadRequestError, match="cache holds"):
        broken.openai().completions.create(
            model=broken.served.model_name, prompt=[65] * 300, max_tokens=200, n=1, extra_body={}
        )
