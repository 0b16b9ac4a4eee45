"""Messages to prompt through the model's own template, and where each token of a prompt came from."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from decodescope.errors import InputError
from decodescope.text.blueprint import one_line
from decodescope.text.messages import Message
from decodescope.text.spelling import is_partial
from decodescope.text.template_process import TemplateProcess
from decodescope.text.tokenizer import Tokenizer

TEMPLATE, TEXT = "template", "text"

_PROCESS = TemplateProcess()
_CPU_S, _WALL_S = 5, 60  # a real template needs milliseconds; wall time is generous for busy machines
_MEMORY_BYTES = 1 << 30

# Two characters of a private plane mark where message i begins and ends; a plane in use is left alone.
_PLANES = (0xF0000, 0x100000)
_MOST_MARKED = 30_000


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt. `role`: text, template, or the role of the message it came from.

    `injected`: a control token that someone typed inside a text or message. `partial`: only part of a
    character's bytes.
    """

    id: int
    text: str
    bytes: bytes
    role: str
    injected: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """What really goes into the model: `text` after the chat template, and its tokens."""

    text: str
    tokens: tuple[PromptToken, ...]

    @property
    def ids(self) -> list[int]:
        """The ids, in order."""
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (exclusive) of a rendered prompt came from a message of this role."""

    start: int
    end: int
    role: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation; what no span covers is the template's own."""

    text: str
    spans: tuple[Span, ...]


def raw_prompt(tokenizer: Tokenizer, text: str, context: int | None = None) -> Prompt:
    """A text as it stands, between the BOS and EOS ids which the tokenizer puts around it (role template).

    Raises InputError for a text that is empty, comes to no tokens, or to more than a `context` of tokens holds;
    without tokenising it where its size alone tells.
    """
    if not text:
        raise InputError("text.empty_prompt")
    before, after = (_token(tokenizer, ids, TEMPLATE) for ids in (tokenizer.before, tokenizer.after))
    rendered = Rendered(text, (Span(0, len(text), TEXT),))
    return _prompt(text, (*before, *_with_roles(tokenizer, rendered, context), *after))


def ids_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> Prompt:
    """Ids as they stand, known to be in the vocabulary. Raises InputError for none."""
    if not ids:
        raise InputError("text.empty_prompt")
    return _prompt(tokenizer.decode(ids), tuple(_token(tokenizer, ids, TEXT)))


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], context: int | None = None) -> Prompt:
    """A conversation through the model's chat template, ending with the head of the assistant's answer.

    The template writes BOS itself if it wants one. Raises InputError for a conversation without any content,
    one that is too long (see `raw_prompt`), a model without a template and a template that fails.
    """
    if not any(message["content"] for message in messages):
        raise InputError("chat.empty")
    rendered = render_chat(tokenizer, messages)
    return _prompt(rendered.text, tuple(_with_roles(tokenizer, rendered, context)))


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> Rendered:
    """The text of a conversation by the model's template, and what in it came from which message.

    It is rendered as it is and with marked contents; if taking the marks out gives the same text, they tell
    the spans. A template that looks into the contents can spoil this; then the contents are searched in order.
    """
    if tokenizer.chat_template is None:
        raise InputError("chat.no_template")
    plane = _free_plane(tokenizer.chat_template, messages)
    variants = [list(messages)]
    if plane is not None:
        stripped = [{**message, "content": message["content"].strip()} for message in messages]
        variants += [_marked(messages, plane), _marked(stripped, plane)]
    common = {**tokenizer.names, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
    contexts = [{**common, "messages": variant} for variant in variants]
    text, marked = _render(tokenizer.chat_template, contexts)
    for candidate in marked:
        spans = _read_marks(candidate, text, messages, plane or 0)
        if spans is not None:
            return Rendered(text, spans)
    return Rendered(text, tuple(_searched(text, messages)))


def _prompt(text: str, tokens: tuple[PromptToken, ...]) -> Prompt:
    if not tokens:  # a vocabulary may lack some bytes, a template may print nothing
        raise InputError("text.no_tokens")
    return Prompt(text, tokens)


def _render(template: str, contexts: list[dict[str, Any]]) -> tuple[str, list[str | None]]:
    """Render in a process of its own: the first text, and the others, None where they failed."""
    limits = {"cpu_s": _CPU_S, "wall_s": _WALL_S, "memory_bytes": _MEMORY_BYTES}
    answer = _PROCESS.answer({"template": template, "contexts": contexts, **limits})
    if "texts" in answer:
        return answer["texts"][0], answer["texts"][1:]
    if answer["fault"] == "limits":
        raise InputError("chat.template_limits", seconds=_CPU_S, memory_mb=_MEMORY_BYTES >> 20)
    raise InputError("chat.template_failed", reason=one_line(answer["reason"]))


def _free_plane(template: str, messages: Sequence[Message]) -> int | None:
    """The first code point of a private plane that neither template nor contents use."""
    if len(messages) > _MOST_MARKED:
        return None
    used = set(template).union(*(message["content"] for message in messages))
    planes = {ord(character) & ~0xFFFF for character in used}
    return next((plane for plane in _PLANES if plane not in planes), None)


def _marked(messages: Sequence[Message], plane: int) -> list[Message]:
    def mark(number: int, content: str) -> str:
        return f"{chr(plane + 2 * number)}{content}{chr(plane + 2 * number + 1)}" if content else content

    return [{**message, "content": mark(i, message["content"])} for i, message in enumerate(messages)]


def _read_marks(marked: str | None, text: str, messages: Sequence[Message], plane: int) -> tuple[Span, ...] | None:
    """The spans between the marks, or None unless they pair up and the rest equals the true text."""
    if marked is None:
        return None
    parts = re.split(f"([{chr(plane)}-{chr(plane + 0xFFFF)}])", marked)
    if "".join(parts[::2]) != text:
        return None
    spans: list[Span] = []
    at, opened = 0, None
    for plain, mark in zip(parts[::2], [*parts[1::2], None], strict=True):
        if opened is not None and plain:
            spans.append(Span(at, at + len(plain), messages[opened]["role"]))
        at += len(plain)
        if mark is None:
            return tuple(spans) if opened is None else None
        number, ends = divmod(ord(mark) - plane, 2)
        if opened != (number if ends else None):
            return None
        opened = None if ends else number
    return None


def _searched(text: str, messages: Sequence[Message]) -> Iterator[Span]:
    """Each content where it next occurs: whole, without outer whitespace, or what follows the thinking."""
    at = 0
    for message in messages:
        content = message["content"]
        forms = (content, content.strip(), content.rpartition("</think>")[2].strip())
        found = next(((place, form) for form in forms if form and (place := text.find(form, at)) >= 0), None)
        if found is not None:
            place, form = found
            at = place + len(form)
            yield Span(place, at, message["role"])


def check_length(tokens: int, context: int | None) -> None:
    """Raise InputError for more tokens than a context holds with an answer behind them."""
    if context is not None and tokens >= context:
        raise InputError("run.prompt_too_long", tokens=tokens, context=context)


def _check_size(tokenizer: Tokenizer, text: str, context: int | None) -> None:
    """Raise InputError for a text of which it shows at once that a context cannot hold it and an answer."""
    if context is not None and len(text) >= context and (fewest := tokenizer.fewest(text)) >= context:
        raise InputError("run.text_too_long", characters=len(text), tokens=fewest, most=context)


def _with_roles(tokenizer: Tokenizer, rendered: Rendered, context: int | None) -> Iterator[PromptToken]:
    """The tokens of a text; one that straddles a border belongs to the message it holds a character of."""
    _check_size(tokenizer, rendered.text, context)
    found = tokenizer.encode_spans(rendered.text)
    check_length(len(found), context)  # before millions of tokens are described
    roles = [TEMPLATE] * len(rendered.text)
    for span in rendered.spans:
        roles[span.start : span.end] = [span.role] * (span.end - span.start)
    for token_id, start, end in found:
        covered = roles[start : max(end, start + 1)]
        role = next((role for role in covered if role != TEMPLATE), TEMPLATE)
        yield from _token(tokenizer, (token_id,), role)


def _token(tokenizer: Tokenizer, ids: Sequence[int], role: str) -> Iterator[PromptToken]:
    for token_id in ids:
        raw = tokenizer.token_bytes(token_id)
        injected = role != TEMPLATE and tokenizer.is_special(token_id)
        yield PromptToken(token_id, tokenizer.token_text(token_id), raw, role, injected, is_partial(raw))
