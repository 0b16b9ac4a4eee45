"""`/v1`: what OpenAI's clients call."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from decodescope.web.faults import JsonAnswer
from decodescope.web.generating import Desk, check_model
from decodescope.web.openai_answers import ChatCompletion, Completion, ErrorAnswer, Model, ModelList
from decodescope.web.openai_requests import ChatRequest, CompletionRequest
from decodescope.web.served import Served

REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def openai_routes(served: Served) -> APIRouter:
    """Models, completions and chat completions of the model that is served."""
    routes, desk = APIRouter(prefix="/v1", responses=REFUSALS), Desk(served)

    @routes.get("/models", response_model=ModelList)
    async def models() -> Response:
        return JsonAnswer(ModelList(data=[_model(served)]).model_dump())

    @routes.get("/models/{name:path}", response_model=Model)
    async def model(name: str) -> Response:
        check_model(name, served)
        return JsonAnswer(_model(served).model_dump())

    @routes.post("/completions", response_model=Completion, responses=_STREAMED)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await desk.answer(asked, request)

    @routes.post("/chat/completions", response_model=ChatCompletion, responses=_STREAMED)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await desk.answer(asked, request)

    return routes


def _model(served: Served) -> Model:
    return Model(
        id=served.model_name,
        created=served.started_at,
        owned_by="decodescope",
        max_model_len=served.session.context,
    )
