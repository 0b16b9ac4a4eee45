"""An answer in the two forms that OpenAI's clients know: whole, or in chunks as it comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

from decodescope.serving.orders import Ticket
from decodescope.trace.records import End, Step
from decodescope.web.openai_requests import ChatRequest, CompletionRequest, Wanted
from decodescope.web.openai_tokens import side_by_side, token_logprob

Plain = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One choice on its way: what its order has delivered so far. A stream keeps no `steps`."""

    index: int
    ticket: Ticket
    prompt_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the text before each of `steps`
    characters: int = 0  # of the text that has come
    tokens: int = 0
    end: End | None = None

    def take(self, step: Step) -> int:
        """Count a step in; says where in the text it stands."""
        at = self.characters
        self.characters += len(step.delta_text)
        self.tokens += 1
        return at


class Form(Protocol):
    """How an answer is said."""

    def opening(self, answer: Answer) -> Iterator[Plain]:
        """Chunks before the first token of an answer."""

    def step(self, answer: Answer, step: Step) -> Iterator[Plain]:
        """Chunks for one token, none where it adds nothing."""

    def closing(self, answer: Answer, end: End) -> Iterator[Plain]:
        """The last chunk: held-back text and why it ended."""

    def usage(self, usage: Plain) -> Plain:
        """The chunk of usage alone."""

    def whole(self, answers: Sequence[Answer], usage: Plain) -> Plain:
        """All answers at once."""


class _Form:
    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, wanted: Wanted, model: str, run_id: str) -> None:
        self.ids, self.as_ids = bool(wanted.return_token_ids), bool(wanted.return_tokens_as_token_ids)
        self._head = {"id": f"{self.prefix}-{run_id}", "created": int(time()), "model": model}
        self._with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage

    def usage(self, usage: Plain) -> Plain:
        """The chunk of usage alone."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _chunk(self, choice: Plain, **more: Any) -> Plain:
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **more, **usage}

    def _whole(self, choices: list[Plain], usage: Plain, **more: Any) -> Plain:
        return {**self._head, "object": self.kind, "choices": choices, **more, "usage": usage}

    def _choice(self, answer: Answer, end: End | None, ids: Sequence[int] | None) -> Plain:
        """What choices of all kinds have."""
        choice = {
            "index": answer.index,
            "finish_reason": end.finish_reason if end else None,
            "stop_reason": end.stop_string if end else None,
            "stop_guard": end.stop_guard if end else None,
            "run_id": answer.ticket.run_id,
        }
        return {**choice, "token_ids": list(ids)} if self.ids and ids is not None else choice


class CompletionForm(_Form):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, wanted: CompletionRequest, model: str, run_id: str) -> None:
        super().__init__(wanted, model, run_id)
        self._top = wanted.top

    def opening(self, answer: Answer) -> Iterator[Plain]:
        """The ids of the prompt, where they are wanted."""
        if self.ids:
            choice = self._choice(answer, None, ())
            yield self._chunk({**choice, "text": "", "logprobs": None, "prompt_token_ids": answer.prompt_ids})

    def step(self, answer: Answer, step: Step) -> Iterator[Plain]:
        """One token."""
        at = answer.take(step)
        if step.delta_text or self.ids or self._top is not None:
            choice = self._choice(answer, None, [step.token_id])
            yield self._chunk({**choice, "text": step.delta_text, "logprobs": self._logprobs([step], [at])})

    def closing(self, answer: Answer, end: End) -> Iterator[Plain]:
        """The last chunk."""
        choice = self._choice(answer, end, ())
        yield self._chunk({**choice, "text": end.text[answer.characters :], "logprobs": None})

    def whole(self, answers: Sequence[Answer], usage: Plain) -> Plain:
        """All answers at once."""
        return self._whole([self._answer(answer) for answer in answers], usage)

    def _answer(self, answer: Answer) -> Plain:
        choice = self._choice(answer, answer.end, [step.token_id for step in answer.steps])
        text = answer.end.text if answer.end else ""
        prompt = {"prompt_token_ids": answer.prompt_ids} if self.ids else {}
        return {**choice, "text": text, "logprobs": self._logprobs(answer.steps, answer.offsets), **prompt}

    def _logprobs(self, steps: Sequence[Step], offsets: Sequence[int]) -> Plain | None:
        return None if self._top is None else side_by_side(steps, offsets, self._top, self.as_ids)


class ChatForm(_Form):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, wanted: ChatRequest, model: str, run_id: str) -> None:
        super().__init__(wanted, model, run_id)
        self._top = wanted.top

    def opening(self, answer: Answer) -> Iterator[Plain]:
        """Who speaks; the ids of the prompt, where they are wanted."""
        choice = self._choice(answer, None, ())
        delta = {"role": "assistant", "content": ""}
        yield self._chunk({**choice, "delta": delta, "logprobs": None}, **self._prompt(answer))

    def step(self, answer: Answer, step: Step) -> Iterator[Plain]:
        """One token."""
        answer.take(step)
        if step.delta_text or self.ids or self._top is not None:
            choice = self._choice(answer, None, [step.token_id])
            yield self._chunk(
                {**choice, "delta": {"content": step.delta_text}, "logprobs": self._logprobs([step])}
            )

    def closing(self, answer: Answer, end: End) -> Iterator[Plain]:
        """The last chunk."""
        rest = end.text[answer.characters :]
        delta = {"content": rest} if rest else {}
        yield self._chunk({**self._choice(answer, end, ()), "delta": delta, "logprobs": None})

    def whole(self, answers: Sequence[Answer], usage: Plain) -> Plain:
        """All answers at once."""
        choices = [self._answer(answer) for answer in answers]
        return self._whole(choices, usage, **self._prompt(answers[0]))

    def _answer(self, answer: Answer) -> Plain:
        choice = self._choice(answer, answer.end, [step.token_id for step in answer.steps])
        message = {"role": "assistant", "content": answer.end.text if answer.end else ""}
        return {**choice, "message": message, "logprobs": self._logprobs(answer.steps)}

    def _prompt(self, answer: Answer) -> Plain:
        return {"prompt_token_ids": answer.prompt_ids} if self.ids else {}

    def _logprobs(self, steps: Sequence[Step]) -> Plain | None:
        if self._top is None:
            return None
        return {"content": [token_logprob(step, self._top, self.as_ids) for step in steps]}
