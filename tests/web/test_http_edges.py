"""What only shows on a real connection: bodies that never end or never come, silence, and the pages for scrapers."""

import resource
import socket
import time
from contextlib import ExitStack
from select import select

import live_web
import pytest
from live_web import TOKEN, serving
from waiting import until

from decodescope.serving.orders import Plan
from decodescope.web import generating, server
from decodescope.web.bodies import Limits
from decodescope.web.serve import Service

LIMIT = 10_000
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def narrow(tiny_session):
    """A server that takes small bodies and waits for none."""
    limits = Limits(body_bytes=LIMIT, body_seconds=0.5)
    with serving(tiny_session, Service(Plan(1 << 28, most_running=1)), limits) as running:
        yield running


def connected(live) -> socket.socket:
    host, port = live.url.removeprefix("http://").removesuffix("/").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(*lines: str) -> bytes:
    own = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}")
    return "\r\n".join([*own, "Content-Type: application/json", *lines, "", ""]).encode()


def answer(connection: socket.socket) -> str:
    """Everything up to the end of the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def test_a_chunked_body_that_never_ends_is_cut_off_at_the_limit(narrow):
    with connected(narrow) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        for _ in range(LIMIT // 1000 + 1):
            connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert answer(connection).startswith("HTTP/1.1 413")


def test_a_body_that_was_announced_too_large_need_not_be_sent(narrow):
    with connected(narrow) as connection:
        connection.sendall(head(f"Content-Length: {LIMIT + 1}"))
        assert answer(connection).startswith("HTTP/1.1 413")


def test_a_body_that_does_not_come_is_not_waited_for(narrow):
    with connected(narrow) as connection:
        connection.sendall(head("Content-Length: 100") + b'{"prompt": ')
        assert answer(connection).startswith("HTTP/1.1 408")


@pytest.fixture
def hasty(narrow, monkeypatch):
    """A server that does not wait long for a request."""
    monkeypatch.setattr(server, "HEAD_S", 0.25)
    return narrow


@pytest.mark.parametrize("before", [b"", GET_HEALTH, GET_HEALTH * 2])
@pytest.mark.parametrize("part", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_whole_request_is_closed_at_the_beginning_and_later(hasty, before, part):
    with connected(hasty) as connection:
        connection.sendall(before + part)
        assert answer(connection).count("HTTP/1.1 200") == before.count(b"GET")


def test_a_request_that_drips_is_closed_too(hasty):
    with connected(hasty) as connection, pytest.raises(OSError):
        for _ in range(100):
            connection.sendall(b"G")
            time.sleep(0.05)


def test_what_is_under_way_is_not_closed(hasty):
    with hasty.streaming() as stream:
        began = time.monotonic()
        for _ in stream:
            if time.monotonic() - began > 0.6:
                break
        else:
            pytest.fail("the stream has ended")


def test_silent_connections_shut_nobody_out(narrow):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 4096:
        pytest.skip("too few files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    silent = [connected(narrow) for _ in range(1030)]
    try:
        with narrow.http() as http:
            assert http.get("v1/models").status_code == 200
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def crowded(tiny_session):
    """A server that keeps eight connections, and these for as long as they like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "HEAD_S", 3600.0)
        with serving(tiny_session, Service(Plan(1 << 28, most_running=1)), Limits(requests=4)) as running:
            yield running


def healthy(connection: socket.socket) -> bool:
    connection.sendall(GET_HEALTH)
    heard = b""
    while not heard.endswith(b"}"):
        part = connection.recv(65536)
        assert part, heard
        heard += part
    return heard.startswith(b"HTTP/1.1 200")


def are_open(connections: list[socket.socket]) -> list[bool]:
    """Of connections on which nothing is to be read but their end."""
    ended, _, _ = select(connections, [], [], 0)
    return [each not in ended for each in connections]


def test_beyond_the_limit_the_oldest_that_have_asked_for_nothing_make_way_at_once(crowded):
    with ExitStack() as stack:
        stream = iter(stack.enter_context(crowded.streaming()))
        known = stack.enter_context(connected(crowded))
        assert healthy(known)
        silent = [stack.enter_context(connected(crowded)) for _ in range(100)]
        until(lambda: sum(are_open(silent)) <= 6)
        assert are_open(silent) == [False] * 94 + [True] * 6
        assert healthy(known) and next(stream) and next(stream)
        with crowded.http() as http:
            assert http.get("v1/models").status_code == 200


def test_where_all_have_asked_for_something_the_one_that_did_longest_ago_makes_way(crowded):
    with ExitStack() as stack:
        known = [stack.enter_context(connected(crowded)) for _ in range(8)]
        assert all(map(healthy, known))
        assert healthy(known[0])
        new = stack.enter_context(connected(crowded))
        until(lambda: not all(are_open(known)))
        assert are_open(known) == [True, False, *[True] * 6]
        assert healthy(new) and healthy(known[0])


def test_where_all_are_being_answered_it_is_the_newcomer_that_has_to_go(tiny_session, monkeypatch):
    monkeypatch.setattr(live_web, "most_connections", lambda requests: 2)
    with serving(tiny_session, Service(Plan(1 << 28, most_running=2))) as running, ExitStack() as stack:
        streams = [iter(stack.enter_context(running.streaming())) for _ in range(2)]
        assert answer(stack.enter_context(connected(running))) == ""
        assert all(next(each) for each in streams)


def test_connections_are_twice_as_many_as_requests_and_leave_half_of_the_files_alone():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        assert (server.most_connections(10), server.most_connections(1000)) == (20, 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_stream_that_waits_for_its_turn_says_that_it_is_there(narrow, monkeypatch):
    monkeypatch.setattr(generating, "PING_S", 0.05)
    with (
        narrow.streaming() as first,
        narrow.http() as http,
        http.stream("POST", "v1/completions", json={"prompt": "y", "max_tokens": 2, "stream": True}) as waiting,
    ):
        assert waiting.headers["x-accel-buffering"] == "no"
        lines = waiting.iter_lines()
        assert next(lines).startswith(": ")
        first.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_metrics_are_text_and_openmetrics_where_asked_for(live):
    with live.http() as http:
        plain = http.get("metrics")
        asked = http.get("metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")
    assert "decodescope_kv_cache_capacity_bytes" in plain.text


def test_what_is_refused_is_counted_once_by_its_reason(tiny_session):
    def refused(http) -> dict[str, float]:
        lines = [line for line in http.get("metrics").text.splitlines() if "requests_refused_total{" in line]
        return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    json = {"Content-Type": "application/json"}
    with (
        serving(tiny_session, Service(Plan(1 << 24, most_running=1, most_waiting=0))) as running,
        running.http() as http,
    ):
        http.post("v1/completions", content=b"{", headers=json)
        http.post("v1/completions", json={"prompt": "x", "tools": [{}]})
        http.post("v1/completions", json={"prompt": "x", "model": "other"})
        http.post("v1/completions", json={"prompt": "x", "temperature": -1})
        http.post("v1/completions", json={"prompt": "x", "max_tokens": 100_000})
        http.post("v1/completions", json={"prompt": [65] * (1 << 17)})
        http.post("v1/completions", json={"prompt": "x" * (1 << 20)})
        http.post("v1/completions", json={"prompt": "x", "n": 2})
        with running.streaming():
            http.post("v1/completions", json={"prompt": "x"})
        counted = refused(http)
    assert {reason: count for reason, count in counted.items() if count and reason != "abandoned"} == {
        "invalid": 5,
        "too_large": 1,
        "too_long": 2,
        "queue_full": 1,
    }
