"""The whole application: routes, faults, and the guard around them."""

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp

import decodescope
from decodescope.web.faults import JsonAnswer
from decodescope.web.guard import METRICS, WITHOUT_TOKEN, Access, Guard
from decodescope.web.handlers import add_handlers
from decodescope.web.openai_routes import REFUSALS, openai_routes
from decodescope.web.run_routes import run_routes
from decodescope.web.served import Served


class Health(BaseModel):
    """Whether the engine works: ok or down."""

    status: str


def create_app(served: Served, access: Access) -> ASGIApp:
    """What an ASGI server runs."""
    app = FastAPI(
        title="decodescope",
        version=decodescope.__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    add_handlers(app, served.metrics.refused)
    app.include_router(openai_routes(served))
    app.include_router(run_routes(served))
    _add_own_state(app, served)
    _name_the_token(app)
    return Guard(app, access)


def _add_own_state(app: FastAPI, served: Served) -> None:
    @app.get(WITHOUT_TOKEN, response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        healthy = served.engine.healthy
        return JsonAnswer({"status": "ok" if healthy else "down"}, 200 if healthy else 503)

    @app.get(METRICS, response_class=Response, responses={200: {"content": {"text/plain": {}}}, **REFUSALS})
    def metrics(request: Request) -> Response:
        body, media_type = served.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": media_type})


def _name_the_token(app: FastAPI) -> None:
    """Say in the description what the guard asks for."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        description = described()
        schemes = description.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["token"] = {"type": "http", "scheme": "bearer"}
        for path, operations in description["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path == WITHOUT_TOKEN else [{"token": []}]
        return description

    app.openapi = openapi  # type: ignore[method-assign]
