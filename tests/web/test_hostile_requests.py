"""Requests made to cost much: whatever is wrong a hundred thousand times is told once, and read once."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from decodescope.errors import InputError
from decodescope.locale import LANGUAGES, catalogue, set_language
from decodescope.text.tokenizer import Tokenizer
from decodescope.web.faults import fault_answer
from decodescope.web.openai_requests import ChatRequest, CompletionRequest

MANY = 50_000
UNKNOWN = {f"field{number}": 1 for number in range(MANY)}
HELLO = {"role": "user", "content": "x"}
JSON = {"Content-Type": "application/json"}


def prompt(value: object, **more: object) -> tuple[type, dict[str, Any]]:
    return CompletionRequest, {"prompt": value, **more}


def messages(*value: object, **more: object) -> tuple[type, dict[str, Any]]:
    return ChatRequest, {"messages": list(value), **more}


@pytest.mark.parametrize("form, body", [
    prompt([-1] * MANY), prompt([1] * MANY + [-1] * MANY), prompt([""] * MANY), prompt([[]] * MANY),
    prompt([[-1] * MANY] * 3), prompt([None] * MANY), prompt("x", stop=[1] * MANY), prompt("x", stop=[""] * MANY),
    prompt("x", guards=[1] * MANY), prompt("x", without=[1] * MANY), prompt("x", tools=[1] * MANY),
    prompt("x", **UNKNOWN), prompt("x", stream_options=UNKNOWN), prompt("x", logit_bias=UNKNOWN),
    messages(*[1] * MANY), messages(*[{}] * MANY), messages({**HELLO, **UNKNOWN}),
    messages({"role": "user", "content": [1] * MANY}), messages({"role": "user", "content": [UNKNOWN]}),
    messages({**HELLO, "tool_calls": [1] * MANY}),
])  # fmt: skip
def test_however_much_is_wrong_few_faults_are_recorded(form, body):
    with pytest.raises(ValidationError) as caught:
        form.model_validate(body)
    assert caught.value.error_count() < 10


@pytest.mark.parametrize("field", ["guards", "without"])
def test_guards_and_stages_are_eight_at_most(field):
    CompletionRequest.model_validate({"prompt": "x", field: ["top_k"] * 8})
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x", field: ["top_k"] * 9})


@pytest.mark.parametrize("prompt_of", [
    lambda session, text: session.prompt(text, chat=False),
    lambda session, text: session.chat([{"role": "user", "content": text}]),
    lambda session, text: session.prompt_of([65] * len(text)),
])  # fmt: skip
def test_a_prompt_beyond_the_context_never_becomes_one(tiny_session, prompt_of):
    with pytest.raises(InputError, match="context holds 131072"):
        prompt_of(tiny_session, "a" * (1 << 17))


@pytest.mark.parametrize("body, path", [
    ({"prompt": "x" * (2 << 20)}, "completions"),
    ({"prompt": [" " * (2 << 20), "x"]}, "completions"),
    ({"messages": [HELLO, {"role": "user", "content": "x" * (2 << 20)}]}, "chat/completions"),
])  # fmt: skip
def test_a_text_that_shows_by_its_size_that_it_is_too_long_is_not_tokenised(live, monkeypatch, body, path):
    monkeypatch.delattr(Tokenizer, "_encode")
    error = error_of(live, body, path)
    assert error["code"] == "context_length_exceeded" and "may take 131,072" in error["message"]


def error_of(live, body: object, path: str = "completions") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with live.http() as http:
        answer = http.post(f"v1/{path}", content=content, headers=JSON)
    assert answer.status_code in (400, 404)
    return answer.json()["error"]


@pytest.mark.parametrize("body, words", [
    (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "4300 digits"),
    (b"[" * 100_000, "nested"),
    (b"{", "JSON"), (b"\xff", "JSON"), (b"[]", "JSON"),
])  # fmt: skip
def test_a_body_that_cannot_be_read_is_told_why(live, body, words):
    assert words in error_of(live, body)["message"]


@pytest.mark.parametrize("body, path, param, code", [
    ({"prompt": "x", "temperature": float("nan")}, "completions", "temperature", "invalid_value"),
    ({"prompt": "x", "temperature": -1}, "completions", "temperature", "invalid_value"),
    ({"prompt": "x", "guards": ["loop=never"]}, "completions", "guards", "invalid_value"),
    ({"prompt": [-1]}, "completions", "prompt[0]", "invalid_value"),
    ({"prompt": [65] * (1 << 17)}, "completions", None, "context_length_exceeded"),
    ({"prompt": "x", "model": "other"}, "completions", "model", "model_not_found"),
    ({"messages": [HELLO], "top_logprobs": 2}, "chat/completions", "top_logprobs", "invalid_value"),
    ({"messages": [HELLO, {"role": "user"}]}, "chat/completions", "messages[1].content", "invalid_value"),
    ({"messages": [HELLO, {**HELLO, "name": "x"}]}, "chat/completions", "messages[1].name", "unsupported"),
    ({"messages": [{**HELLO, "tool_calls": [1]}]}, "chat/completions", "messages[0].tool_calls", "unsupported"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
     "chat/completions", "messages[0].content[0].text", "invalid_value"),
])  # fmt: skip
def test_a_fault_has_a_place_and_one_word_for_programs(live, body, path, param, code):
    error = error_of(live, body, path)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("field", ["seed", "top_k", "penalty_window"])
def test_a_value_is_not_sent_back_at_length(live, field):
    error = error_of(live, {"prompt": "x", field: 10**4000})
    assert error["param"] == field and len(error["message"]) < 250


FAULTS = [
    {}, {"prompt": 5}, {"prompt": ""}, {"prompt": []}, {"prompt": [1.5]}, {"prompt": [[-1]]}, {"prompt": "\ud800"},
    {"prompt": "x", "n": 0}, {"prompt": "x", "n": 65}, {"prompt": "x", "max_tokens": 1 << 31},
    {"prompt": "x", "max_tokens": "1"}, {"prompt": "x", "stream": 1}, {"prompt": "x", "temperature": "1"},
    {"prompt": "x", "guards": "loop"}, {"prompt": "x", "guards": ["a"] * 9}, {"prompt": "x", "stop": [""]},
    {"prompt": "x", "stream_options": 1}, {"prompt": "x", "model": 1}, {"prompt": "x", "guards": ["x"]},
]  # fmt: skip
CHAT_FAULTS = [
    {}, {"messages": []}, {"messages": [5]}, {"messages": [{"role": "x", "content": "x"}]},
    {"messages": [HELLO], "top_logprobs": 1}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "path, body",
    [*(("completions", body) for body in FAULTS), *(("chat/completions", body) for body in CHAT_FAULTS)],
)
def test_every_fault_is_told_in_the_language_in_force_and_in_words_of_http(live, path, body):
    english = error_of(live, body, path)["message"]
    set_language("zh")
    try:
        chinese = error_of(live, body, path)["message"]
    finally:
        set_language(None)
    assert "--" not in english
    assert re.search("[一-鿿]", chinese)
    assert not re.search(r"[Ii]nput should|[Ff]ield required|at least|valid| or ", chinese)


HEARD = (
    "run.nonfinite", "memory.running", "run.prompt_too_long", "run.text_too_long", "run.id_outside", "fork.id_outside",
    "serve.busy", "serve.too_large", "serve.too_many_orders", "serve.failed", "serve.no_run", "disk.write",
    "sampling.nothing_left", "sampling.checkpoint", "text.empty_prompt", "text.no_tokens", "text.not_unicode",
    "text.cannot_encode", "text.empty_stop_string", "chat.empty",
)  # fmt: skip


@pytest.mark.parametrize("key", HEARD)
def test_what_a_client_may_hear_names_no_option_of_a_command(key):
    assert all("--" not in catalogue(language)[f"error.{key}"] for language in LANGUAGES)


def test_no_answer_names_a_folder_of_the_server():
    for name in ("empty", "damaged", "still_written"):
        answer = fault_answer(InputError(f"trace.{name}", path="/home/somebody/runs", reason="x"))
        assert answer.status_code == 500 and b"somebody" not in answer.body
