"""`/runs`: recorded runs, read from their folders, finished ones and those that are still being written."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Path
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from decodescope.errors import InputError
from decodescope.serving.archive import Archive
from decodescope.trace.lines import Record, json_text, record_line
from decodescope.trace.saved import read_steps, read_trace
from decodescope.web.event_stream import PING, PING_S, EventStream, event
from decodescope.web.faults import JsonAnswer, fault_answer
from decodescope.web.openai_routes import REFUSALS
from decodescope.web.served import Served

LOOK_S = 0.25  # between two looks at a run that is being written
_REST = 8  # times as long as a look took: a long run costs little of the machine that makes it
_LINES = "application/x-ndjson"
_FOLLOWED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    204: {"description": "The last event was the end."},
}
RunId = Annotated[str, Path(max_length=200)]
LastEventId = Annotated[str | None, Header(pattern="^[0-9]{1,9}$", description="Of the last event that was read.")]


class RunEntry(BaseModel):
    """A recorded run."""

    run_id: str
    started_at: str
    size_bytes: int
    running: bool


class RunList(BaseModel):
    """The recorded runs, newest first; none where nothing is recorded."""

    runs: list[RunEntry]


@dataclass(frozen=True, slots=True)
class Look:
    """What a run consists of at one moment from one of its lines on, and whether more will come."""

    records: Sequence[Record]
    over: bool


def run_routes(served: Served) -> APIRouter:
    """List, read and follow recorded runs."""
    routes = APIRouter(prefix="/runs", responses=REFUSALS)

    @routes.get("", response_model=RunList)
    async def runs() -> Response:
        entries = await run_sync(served.archive.entries) if served.archive else []
        return JsonAnswer({"runs": [asdict(entry) for entry in entries]})

    @routes.get("/{run_id}", response_class=StreamingResponse, responses={200: {"content": {_LINES: {}}}})
    async def run(run_id: RunId) -> Response:
        look = await run_sync(look_at, _archive(served, run_id), run_id)
        return StreamingResponse(_lines(look.records), media_type=_LINES)

    @routes.get("/{run_id}/events", response_class=Response, responses=_FOLLOWED)
    async def events(run_id: RunId, last_event_id: LastEventId = None) -> Response:
        archive, first = _archive(served, run_id), 0 if last_event_id is None else int(last_event_id) + 1
        look = await run_sync(look_at, archive, run_id, first)
        if look.over and not look.records:
            return Response(status_code=204)  # tells a browser not to come back
        return EventStream(followed(archive, run_id, first))

    return routes


def look_at(archive: Archive, run_id: str, first: int = 0) -> Look:
    """The lines that `show --json` prints of a run, as far as it has come, from number `first` on.

    Of a run that is being written only what is new is read: its line i is node i - 1. One that has only just begun
    has no lines yet. Raises InputError.
    """
    running = archive.is_running(run_id)
    try:
        folder = archive.folder(run_id)
        if running and first > 0:
            return Look(read_steps(folder, first - 1), over=False)
        trace = read_trace(folder)
    except InputError:
        if running:
            return Look((), over=False)
        raise
    ended: tuple[Record, ...] = (trace.end,) if trace.end and not running else ()
    return Look([trace.run, *trace.path(), *ended][first:], over=not running)


async def followed(archive: Archive, run_id: str, first: int) -> AsyncIterator[bytes]:
    """The run's lines from number `first` on as events, each soon after it is there; the last is the end."""
    told_at = perf_counter()
    while True:
        started = perf_counter()
        try:
            look = await run_sync(look_at, archive, run_id, first)
        except InputError as fault:  # it has made way for newer ones
            yield event(bytes(fault_answer(fault).body).decode())
            return
        for record in look.records:
            yield event(json_text(record_line(record)), first)
            first, told_at = first + 1, perf_counter()
        if look.over:
            return
        if perf_counter() - told_at > PING_S:
            told_at = perf_counter()
            yield PING
        await asyncio.sleep(max(LOOK_S, _REST * (perf_counter() - started)))


def _archive(served: Served, run_id: str) -> Archive:
    if served.archive is None:
        raise InputError("serve.no_run", name=run_id[:80])
    return served.archive


def _lines(records: Sequence[Record]) -> Iterator[str]:
    return (json_text(record_line(record)) + "\n" for record in records)
