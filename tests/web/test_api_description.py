"""The OpenAPI description and the server say the same: requests made up from it find no fault in either."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from decodescope.serving.archive import Archive
from decodescope.serving.orders import Plan
from decodescope.session import Session
from decodescope.web.app import create_app
from decodescope.web.guard import Access
from decodescope.web.openai_requests import ChatRequest, CompletionRequest
from decodescope.web.serve import Service, make_served
from repository import text
from tiny_model import make_tiny_model

TOKEN = "a-token-of-some-length"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Host": "localhost"}
EXAMPLES = 20  # of each operation
load_all_checks()


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    session = Session.open(str(make_tiny_model(folder / "tiny", max_position_embeddings=24)), threads=1)
    served = make_served(session, Service(Plan(1 << 22), Archive(folder / "runs", "sample=0.1", 1 << 24)))
    served.engine.start()
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(served, Access(TOKEN, 8000)), headers=HEADERS)
    served.engine.close()


OPERATIONS = [
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/runs"),
    ("GET", "/runs/{run_id}"), ("GET", "/runs/{run_id}/events"), ("GET", "/health"), ("GET", "/metrics"),
]  # fmt: skip

CASES = [
    pytest.param(*operation, mode, id=f"{operation[1]} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if operation[1] != "/health" or mode is GenerationMode.POSITIVE  # nothing can be wrong with a request for it
]


def test_every_operation_is_described(api):
    described = {(method.upper(), path) for path, methods in api.raw_schema["paths"].items() for method in methods}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize("document", ["serving.md", "serving.zh-CN.md"])
def test_every_field_and_address_is_in_the_documents(api, document):
    page = text(f"docs/{document}")
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *(path for _, path in OPERATIONS)}
    assert not {name for name in fields if name not in page}


@pytest.mark.parametrize("method, path, mode", CASES)
def test_requests_made_up_from_the_description_find_no_fault(api, method, path, mode):
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def attack(case):
        # What a vocabulary, a context and a template take no schema can say: such requests are refused with 400.
        case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance])

    attack()
