"""The official client against a live server: what it asks for it gets, in the shapes it knows."""

import json

import openai
import pytest

from decodescope.options import RunOptions
from decodescope.session import Session
from decodescope.web.openai_requests import ChatRequest, CompletionRequest

GREEDY = {"temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "你好, hello"}]


def alone(session: Session, prompt: str | list[int], **changes):
    """The same run without a server."""
    ready = session.prompt(prompt, chat=False) if isinstance(prompt, str) else session.prompt_of(prompt)
    return session.run(ready, options=RunOptions(max_new_tokens=12), **changes)


def test_the_model_is_listed(live):
    (model,) = live.openai().models.list().data
    assert model.id == live.served.model_name


def test_a_model_is_found_by_its_name_alone(live):
    client = live.openai()
    assert client.models.retrieve(live.served.model_name) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


def test_a_completion_is_the_run_that_the_session_makes_alone(live, tiny_session):
    trace = alone(tiny_session, "Once upon")
    answer = live.openai().completions.create(model=live.served.model_name, prompt="Once upon", **GREEDY)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (trace.text, trace.end.finish_reason)
    assert answer.id == f"cmpl-{choice.run_id}"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, trace.end.new_tokens)


def test_a_chat_goes_through_the_template(live, tiny_session):
    expected = tiny_session.run(tiny_session.chat(HELLO), max_new_tokens=12)
    answer = live.openai().chat.completions.create(model=live.served.model_name, messages=HELLO, **GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "你好, hello"}]}]
    again = live.openai().chat.completions.create(model=live.served.model_name, messages=parts, **GREEDY)
    assert again.choices[0].message.content == expected.text


def test_an_answer_can_be_sent_back_as_a_message(live):
    client, model = live.openai(), live.served.model_name
    message = client.chat.completions.create(model=model, messages=HELLO, **GREEDY).choices[0].message
    for sent in (message, message.model_dump()):
        following = [*HELLO, sent, {"role": "user", "content": "and?"}]
        assert client.chat.completions.create(model=model, messages=following, **GREEDY).choices


@pytest.mark.parametrize(
    "form, needed", [(CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": HELLO})]
)
def test_null_is_as_good_as_leaving_a_field_out(form, needed):
    nulls = dict.fromkeys(form.model_fields)
    given, plain = form.model_validate({**nulls, **needed}), form.model_validate(needed)
    assert given.model_dump() == plain.model_dump()
    assert (given.new_tokens, given.answers) == (plain.new_tokens, 1)


@pytest.mark.parametrize("field, value", [
    ("tools", []), ("functions", []), ("tool_choice", "auto"), ("logit_bias", {}), ("metadata", {}), ("echo", False),
    ("store", False), ("best_of", 1), ("suffix", ""), ("response_format", {"type": "text"}),
])  # fmt: skip
def test_what_changes_nothing_is_taken(live, field, value):
    client, wanted = live.openai(), {"model": live.served.model_name, "extra_body": {field: value}, **GREEDY}
    assert client.completions.create(prompt="x", **wanted).choices
    assert client.chat.completions.create(messages=HELLO, **wanted).choices


@pytest.mark.parametrize("stop", [None, "e"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_adds_up_to_the_answer_as_a_whole(live, seed, stop):
    wanted = dict(
        model=live.served.model_name, messages=HELLO, max_tokens=24, seed=seed, logprobs=True, top_logprobs=3
    )
    wanted |= {} if stop is None else {"stop": stop}
    extra = {"return_token_ids": True}
    client = live.openai()
    whole = client.chat.completions.create(**wanted, extra_body=extra)
    chunks = list(
        client.chat.completions.create(
            **wanted, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    expected = whole.choices[0]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.message.content
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [expected.finish_reason]
    assert [
        token for choice in choices if choice.logprobs for token in choice.logprobs.content
    ] == expected.logprobs.content
    assert [token for choice in choices for token in choice.token_ids] == expected.token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], whole.usage.total_tokens)


def test_a_streamed_completion_adds_up_too(live):
    wanted = dict(model=live.served.model_name, prompt=["one", "two"], n=2, max_tokens=6, seed=3, logprobs=2)
    client = live.openai()
    whole = client.completions.create(**wanted)
    parts = [choice for chunk in client.completions.create(**wanted, stream=True) for choice in chunk.choices]
    for expected in whole.choices:
        own = [part for part in parts if part.index == expected.index]
        assert "".join(part.text for part in own) == expected.text
        assert [t for part in own if part.logprobs for t in part.logprobs.tokens] == expected.logprobs.tokens
        assert [
            t for part in own if part.logprobs for t in part.logprobs.text_offset
        ] == expected.logprobs.text_offset


def test_logprobs_are_those_of_the_trace_and_bytes_are_exact(live, tiny_session):
    trace = alone(tiny_session, "byte tokens")
    answer = live.openai().chat.completions.create(
        model=live.served.model_name,
        messages=HELLO,
        **GREEDY,
        logprobs=True,
        top_logprobs=20,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    for token, token_id in zip(choice.logprobs.content, choice.token_ids, strict=True):
        assert bytes(token.bytes) == tiny_session.tokenizer.token_bytes(token_id)
        assert token.token == tiny_session.tokenizer.token_text(token_id)
        assert len(token.top_logprobs) == 20
        ranked = [each.logprob for each in token.top_logprobs]
        assert ranked == sorted(ranked, reverse=True) and ranked[0] == token.logprob
    legacy = live.openai().completions.create(
        model=live.served.model_name, prompt="byte tokens", **GREEDY, logprobs=0
    )
    assert legacy.choices[0].logprobs.token_logprobs == [step.logprob_nats for step in trace.path()]


def test_the_bytes_of_tokens_add_up_to_the_text_where_tokens_are_half_characters(live):
    answer = live.openai().chat.completions.create(
        model=live.served.model_name, messages=HELLO, max_tokens=60, seed=1, logprobs=True, extra_body={"ignore_eos": True, "temperature": 5.0},
    )  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert any("�" in token.token for token in content)
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    joined = b"".join(bytes(token.bytes) for token in content if token.token not in special)
    assert joined.decode("utf-8", "replace") == answer.choices[0].message.content


def test_ids_go_in_and_come_out_by_vllms_names(live, tiny_session):
    ids = [72, 101, 108, 108]
    trace = alone(tiny_session, ids)
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = live.openai().completions.create(
        model=live.served.model_name, prompt=ids, **GREEDY, logprobs=1, extra_body=extra
    )
    (choice,) = answer.choices
    assert (choice.prompt_token_ids, choice.token_ids) == (ids, trace.token_ids)
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in trace.token_ids]
    several = live.openai().completions.create(model=live.served.model_name, prompt=[ids, ids[:2]], **GREEDY)
    assert [each.index for each in several.choices] == [0, 1]
    assert several.usage.prompt_tokens == 6


def test_several_answers_draw_with_seeds_of_their_own(live):
    client, model = live.openai(), live.served.model_name
    wanted = dict(model=model, prompt="x", max_tokens=12, temperature=1.5)
    three = client.completions.create(**wanted, n=3, seed=5)
    single = [client.completions.create(**wanted, seed=5 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in three.choices] == single
    assert len(set(single)) > 1
    assert three.usage.prompt_tokens == 1


def test_the_temperature_is_one_unless_said_otherwise(live):
    client, wanted = live.openai(), dict(model=live.served.model_name, prompt="x", max_tokens=12, seed=5)
    assert (
        client.completions.create(**wanted).choices[0].text
        == client.completions.create(**wanted, temperature=1).choices[0].text
    )
    assert (
        client.completions.create(**wanted).choices[0].text
        != client.completions.create(**wanted, temperature=0).choices[0].text
    )


def test_all_sampling_settings_reach_the_sampler(live, tiny_session):
    settings = dict(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.1, no_repeat_ngram_size=3, seed=11, sampler="llamacpp", without=["top_k"], penalty_window=7,
    )  # fmt: skip
    with live.http() as http:
        answer = http.post("v1/completions", json={"prompt": "abc", "max_tokens": 12, **settings}).json()
        lines = http.get(f"runs/{answer['choices'][0]['run_id']}").text
    assert answer["choices"][0]["text"] == alone(tiny_session, "abc", **settings).text
    assert '"penalty_window", "value": 7' in lines


def test_a_stop_string_ends_an_answer_before_itself(live):
    client, model = live.openai(), live.served.model_name
    text = (
        client.completions.create(
            model=model, prompt="x", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
    )
    stop = text[10:12]
    (choice,) = client.completions.create(
        model=model,
        prompt="x",
        max_tokens=40,
        temperature=0,
        stop=[stop, "never"],
        extra_body={"ignore_eos": True},
    ).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_a_guard_can_end_an_answer(live):
    extra = {"guards": ["loop"], "ignore_eos": True}
    (choice,) = (
        live.openai()
        .completions.create(
            model=live.served.model_name, prompt="abababab", temperature=0, max_tokens=2000, extra_body=extra
        )
        .choices
    )
    assert (choice.finish_reason, choice.stop_guard) == ("stop", "loop")


def test_a_prompt_that_was_read_before_is_not_read_again(live):
    client, wanted = (
        live.openai(),
        dict(model=live.served.model_name, prompt="the same long beginning " * 20, **GREEDY),
    )
    first, second = (client.completions.create(**wanted) for _ in range(2))
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens * 0.9
    assert first.choices[0].text == second.choices[0].text


@pytest.mark.parametrize(
    "field, value",
    [
        ("tools", [{"type": "function"}]),
        ("logit_bias", {"1": 1}),
        ("response_format", {"type": "json_object"}),
        ("functions", [{}]),
        ("best_of", 2),
        ("n_predict", None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(live, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().chat.completions.create(
            model=live.served.model_name, messages=HELLO, extra_body={field: value}
        )
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        field,
        "unsupported",
        "invalid_request_error",
    )
    assert field in caught.value.message


@pytest.mark.parametrize("changes, param, words", [
    ({"temperature": -1}, "temperature", "between"),
    ({"top_p": 0}, "top_p", "top"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"seed": -1}, "seed", "seed"),
    ({"n": 65}, "n", "64"),
    ({"stop": [""]}, "stop[0]", "empty"),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": ["a"] * 40, "n": 2}, None, "80"),
    ({"prompt": [999]}, None, "999"),
    ({"prompt": "\ud800"}, "prompt", "Unicode"),
    ({"sampler": "none"}, "sampler", "hf"),
    ({"guards": ["nonsense"]}, "guards", "Guard nonsense"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"stop\x1b[31m": "x"}, "stop␛[31m", "␛"),
    ({"\ud800": 1}, None, "JSON"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_one_clear_sentence(live, changes, param, words):
    with live.http() as http:
        body = json.dumps({"prompt": "x", "max_tokens": 3, **changes})
        answer = http.post("v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"] and "Traceback" not in answer.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"1" * 6000, b"[" * 100_000, b'{"prompt": NaN}']
)
def test_what_is_no_json_object_is_told_so(live, body):
    with live.http() as http:
        answer = http.post("v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found(live):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        live.openai().completions.create(model="gpt-9", prompt="x")


def test_a_wrong_key_is_an_authentication_error(live):
    client = openai.OpenAI(base_url=f"{live.url}v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_prompt_longer_than_the_context_is_refused_before_work(live):
    with live.http() as http:
        answer = http.post("v1/completions", json={"prompt": [65] * (1 << 17)})
    assert answer.status_code == 400
    assert "131072" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path, status", [("nothing", 404), ("v1/completions", 405), ("v1/../runs/x", 404)])
def test_an_address_that_is_none_says_so_in_the_same_shape(live, path, status):
    with live.http() as http:
        answer = http.get(path)
    assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
