"""Clients that leave, read slowly or come too many: their places are free at once, and nobody else suffers."""

import socket

import openai
import pytest
from live_web import TOKEN, serving
from waiting import until

from decodescope.serving.orders import Plan
from decodescope.web.serve import Service

LONG = {"temperature": 0, "max_tokens": 100_000, "extra_body": {"ignore_eos": True}}


def asking(live, client, **more):
    return client.completions.create(model=live.served.model_name, prompt="x", **LONG, **more)


def raw_request(live, body: str) -> socket.socket:
    """A connection that has asked and reads nothing."""
    host, port = live.url.removeprefix("http://").removesuffix("/").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)  # as a slow line would
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def test_a_client_that_closes_its_stream_frees_its_place_at_once(live):
    live.wait_idle()
    stream = asking(live, live.openai(), stream=True)
    next(iter(stream))
    assert live.gauge("requests_running") == 1
    stream.close()
    live.wait_idle()


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_its_place_at_once(live):
    live.wait_idle()
    connection = raw_request(live, '{"prompt": "x", "max_tokens": 100000, "ignore_eos": true}')
    until(lambda: live.gauge("requests_running") == 1)
    connection.close()
    live.wait_idle()


def test_one_that_leaves_takes_all_its_answers_along(live):
    live.wait_idle()
    stream = asking(live, live.openai(), stream=True, n=12)  # some of them wait
    next(iter(stream))
    assert live.gauge("requests_running") == 8
    stream.close()
    live.wait_idle()


def test_beyond_the_queue_a_request_is_told_to_come_back(small):
    client = small.openai()
    first = asking(small, client, stream=True)
    next(iter(first))
    waiting = raw_request(small, '{"prompt": "y", "max_tokens": 100000, "ignore_eos": true}')
    until(lambda: small.gauge("requests_waiting") == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        asking(small, client)
    assert caught.value.response.headers["retry-after"] == "1"
    first.close()
    until(lambda: small.gauge("requests_waiting") == 0)  # its turn has come
    waiting.close()
    small.wait_idle()


def test_of_a_request_that_does_not_fit_whole_nothing_stays(small):
    with small.streaming(), pytest.raises(openai.RateLimitError):
        asking(small, small.openai(), n=2)
    small.wait_idle()


def test_more_answers_than_may_ever_be_there_at_once_are_no_reason_to_try_again(small):
    with pytest.raises(openai.BadRequestError, match="3 answers"):
        asking(small, small.openai(), n=3)


def test_a_reader_that_stops_reading_is_let_go(live):
    live.wait_idle()
    connection = raw_request(
        live, '{"prompt": "x", "max_tokens": 100000, "ignore_eos": true, "stream": true, "logprobs": 20}'
    )
    until(lambda: live.gauge("requests_running") == 1)
    live.wait_idle()  # the engine does not wait for it, and does not work for it
    assert live.openai().completions.create(model=live.served.model_name, prompt="x", max_tokens=2).choices
    connection.close()


def test_a_server_that_stops_ends_streams_with_a_reason(tiny_session):
    with serving(tiny_session, Service(Plan(1 << 28))) as running:
        stream = iter(asking(running, running.openai(), stream=True))
        next(stream)
        engine = running.served.engine
        engine.close()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        with running.http() as http:
            assert http.get("health").status_code == 503
