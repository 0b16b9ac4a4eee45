"""One request from its prompts to its answer: orders go to the engine, what they deliver comes back."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import Response

from decodescope.errors import InputError
from decodescope.options import RunOptions
from decodescope.serving.orders import Order
from decodescope.trace.lines import json_text
from decodescope.trace.records import End, Step
from decodescope.visible import visible
from decodescope.web.event_stream import PING, PING_S, EventStream, disconnected, event
from decodescope.web.faults import JsonAnswer, failure, refusal
from decodescope.web.feed import Feed
from decodescope.web.openai_forms import Answer, ChatForm, CompletionForm, Form
from decodescope.web.openai_requests import MOST_CHOICES, ChatRequest, CompletionRequest
from decodescope.web.served import Served

if TYPE_CHECKING:
    from decodescope.text.chat import Prompt

_PREPARED_AT_ONCE = 4  # requests whose text becomes ids; more would take the processor from the engine
_TOO_LONG = ("run.prompt_too_long", "run.text_too_long")
Asked = CompletionRequest | ChatRequest
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Job:
    """What a request comes to: its prompts, and the options of each of its answers."""

    prompts: "Sequence[Prompt]"
    options: Sequence[RunOptions]  # one for each of the `n` answers to a prompt


class Desk:
    """Takes the requests of one server."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._limiter = CapacityLimiter(_PREPARED_AT_ONCE)

    async def answer(self, asked: Asked, request: Request) -> Response:
        """Answer one request. Raises InputError for one that cannot be, and Busy."""
        self.served.engine.refuse_if_full()
        generation = Generation(self.served)
        prepare = partial(generation.begin, asked)
        await run_sync(prepare, limiter=self._limiter)  # text becomes ids outside the event loop
        run_id = generation.answers[0].ticket.run_id
        form = _form(asked, self.served.model_name, run_id)
        if asked.stream:
            return EventStream(generation.events(form, asked), generation.cancel)
        return await generation.whole(form, request)


class Generation:
    """The orders of one request in the engine. Made in the event loop."""

    def __init__(self, served: Served) -> None:
        self._served, self._engine = served, served.engine
        self._feed = Feed(self.cancel)
        self.answers: list[Answer] = []
        self._open = 0  # answers without an end
        self._each = 1  # answers to one prompt

    def begin(self, asked: Asked) -> None:
        """Make the prompts and queue their orders, all or none. For a worker thread."""
        try:
            job = _job(asked, self._served)
        except InputError as fault:
            self._served.metrics.refused("too_long" if fault.key in _TOO_LONG else "invalid")
            raise
        self._each = len(job.options)
        orders = [Order(prompt, options) for prompt in job.prompts for options in job.options]
        delivers = [self._feed.deliver(index) for index in range(len(orders))]
        tickets = self._engine.submit_all(orders, delivers)
        given = enumerate(zip(tickets, orders, strict=True))
        self.answers = [Answer(index, ticket, order.prompt.ids) for index, (ticket, order) in given]
        self._open = len(self.answers)

    def cancel(self) -> None:
        """Nobody waits any more: free the places of all that still run."""
        for answer in self.answers:
            if answer.end is None:
                self._engine.cancel(answer.ticket)

    async def whole(self, form: Form, request: Request) -> Response:
        """Wait for every end; the client may leave at any time."""
        collecting = asyncio.create_task(self._collect())
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait((collecting, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cancel()
            for task in (collecting, gone):
                task.cancel()
            await asyncio.wait((collecting, gone))
        if collecting.cancelled():
            return Response(status_code=499)  # nobody reads it
        failed = collecting.result()
        return failed or JsonAnswer(form.whole(self.answers, self._usage()))

    async def events(self, form: Form, asked: Asked) -> AsyncIterator[bytes]:
        """The answer as a stream of events."""
        while self._open:
            arrived = await self._feed.next(PING_S)
            if arrived is None and not self._feed.overrun:
                yield PING
                continue
            failed = _too_slow() if arrived is None else self._failed(arrived[1])
            if failed is not None:
                yield event(bytes(failed.body).decode())
                return
            if arrived is not None:
                for chunk in self._chunks(form, *arrived):
                    yield event(json_text(chunk))
        if asked.stream_options and asked.stream_options.include_usage:
            yield event(json_text(form.usage(self._usage())))
        yield _DONE

    async def _collect(self) -> Response | None:
        """Take every record; the answer that says what went wrong, if something did."""
        while self._open:
            arrived = await self._feed.next()
            if arrived is None:
                return _too_slow()
            index, record = arrived
            answer = self.answers[index]
            failed = self._failed(record)
            if failed is not None:
                return failed
            if isinstance(record, End):
                self._close(answer, record)
            else:
                answer.offsets.append(answer.take(record))
                answer.steps.append(record)
        return None

    def _chunks(self, form: Form, index: int, record: Step | End) -> Iterator[dict[str, Any]]:
        answer = self.answers[index]
        if not answer.tokens:
            yield from form.opening(answer)
        if isinstance(record, End):
            yield from form.closing(answer, record)
            self._close(answer, record)
        else:
            yield from form.step(answer, record)

    def _close(self, answer: Answer, end: End) -> None:
        answer.end = end
        self._open -= 1

    def _failed(self, record: Step | End) -> Response | None:
        if not isinstance(record, End) or record.finish_reason in ("stop", "length"):
            return None
        return refusal(503, "web.closing") if record.finish_reason == "interrupted" else failure(record.error)

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many answers there are to it."""
        tickets = [answer.ticket for answer in self.answers[:: self._each]]
        prompt, new = sum(ticket.prompt_tokens for ticket in tickets), sum(each.tokens for each in self.answers)
        cached = sum(ticket.reused_tokens for ticket in tickets)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def check_model(name: str, served: Served) -> None:
    """Raise InputError for the name of another model."""
    if name != served.model_name:
        raise InputError("web.no_model", name=visible(name)[:80], known=served.model_name)


def _form(asked: Asked, model: str, run_id: str) -> Form:
    if isinstance(asked, ChatRequest):
        return ChatForm(asked, model, run_id)
    return CompletionForm(asked, model, run_id)


def _job(asked: Asked, served: Served) -> Job:
    """Raises InputError."""
    if asked.model is not None:
        check_model(asked.model, served)
    count = 1 if isinstance(asked, ChatRequest) else len(asked.prompts)
    if count * asked.answers > MOST_CHOICES:
        raise InputError("web.too_many", count=count * asked.answers, most=MOST_CHOICES)
    options = [_options(asked, served.guards, answer) for answer in range(asked.answers)]
    return Job(_prompts(asked, served), options)


def _prompts(asked: Asked, served: Served) -> "list[Prompt]":
    session = served.session
    if isinstance(asked, ChatRequest):
        return [session.chat([message.plain for message in asked.messages])]
    return [
        session.prompt(prompt, chat=False) if isinstance(prompt, str) else session.prompt_of(prompt)
        for prompt in asked.prompts
    ]


def _options(asked: Asked, guards: Sequence[str], answer: int) -> RunOptions:
    """Of one of the answers to a prompt: each draws with a seed of its own."""
    sampling = asked.sampling
    if asked.seed is not None:
        sampling["seed"] = asked.seed + answer
    return RunOptions(
        sampling=sampling,
        max_new_tokens=asked.new_tokens,
        stop=asked.stops,
        ignore_eos=bool(asked.ignore_eos),
        candidates=max(asked.top or 0, 1),
        guards=tuple(guards if asked.guards is None else asked.guards),
    )


def _too_slow() -> Response:
    return refusal(503, "web.too_slow")
