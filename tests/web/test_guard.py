"""The guard, attacked: names, tokens, cookies, other sites' pages, bodies."""

import asyncio
import json
import re

import pytest
from asgi import Behind, Got, asked
from hypothesis import given
from hypothesis import strategies as st

from decodescope.serving.orders import Plan
from decodescope.web.bodies import Limits
from decodescope.web.guard import LOCAL_NAMES, Access, Guard
from decodescope.web.serve import limits_of

TOKEN = "a-token-of-some-length"
HOST = ("Host", "127.0.0.1:8000")
BEARER = ("Authorization", f"Bearer {TOKEN}")
JSON = ("Content-Type", "application/json")
ALLOWED = (HOST, BEARER, JSON)


def guard(behind: Behind | None = None, hosts: frozenset[str] = LOCAL_NAMES, **limits: float) -> Guard:
    return Guard(behind or Behind(), Access(TOKEN, 8000, hosts, Limits(**limits)))


def ask(
    app: Guard,
    target: str,
    *headers: tuple[str, str],
    method: str = "GET",
    chunks: tuple[bytes, ...] = (),
    pause_s: float = 0,
) -> Got:
    return asyncio.run(asked(app, method, target, headers, chunks, pause_s))


def post(app: Guard, *headers: tuple[str, str], chunks: tuple[bytes, ...] = (b"{}",), pause_s: float = 0) -> Got:
    return ask(app, "/v1/completions", *headers, method="POST", chunks=chunks, pause_s=pause_s)


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/runs", "/v1/models"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "",
        "localhost evil",
        "[::1",
        "localhost:x",
        "evil.example:8000",
        "localhost/evil",
        "[::1]x",
        "[::1]x:8000",
        "[localhost]",
        "localhost:8000:8000",
        "localhost.",
    ],
)
def test_a_name_that_was_rebound_to_this_machine_reaches_nothing(path, host):
    behind = Behind()
    assert ask(guard(behind), path, ("Host", host), BEARER).status == 403
    assert not behind.asked


def test_a_request_without_a_host_or_with_two_reaches_nothing():
    assert ask(guard(), "/health").status == 403
    assert ask(guard(), "/health", HOST, ("Host", "evil.example")).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "my.lan:80"]
)
def test_the_servers_own_names_and_those_that_were_allowed_are_let_in(host):
    assert ask(guard(hosts=LOCAL_NAMES | {"my.lan"}), "/runs", ("Host", host), BEARER).status == 200


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=40))
def test_no_host_is_let_in_but_the_allowed_ones(host):
    status = ask(guard(), "/runs", ("Host", host), BEARER).status
    allowed = re.fullmatch(r"(localhost|127\.0\.0\.1|\[::1\])(:\d*)?", host, re.IGNORECASE | re.ASCII)
    assert status == 403 or allowed


@pytest.mark.parametrize(
    "target",
    [
        "/runs",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/health/../runs",
        "/healthy",
        "//health",
        "/runs?token=",
        "/runs?token=wrong",
    ],
)
@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \xff",
    ],
)
def test_without_the_token_only_health_answers(target, given):
    headers = [HOST] if given is None else [HOST, ("Authorization", given)]
    behind = Behind()
    got = ask(guard(behind), target, *headers)
    assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer")
    assert not behind.asked
    assert ask(guard(), "/health", *headers).status == 200


def test_of_two_tokens_none_counts():
    assert ask(guard(), "/runs", HOST, ("Authorization", "Bearer wrong"), BEARER).status == 403


def test_the_address_with_the_token_becomes_a_cookie_and_an_address_without_it():
    app = guard()
    got = ask(app, f"/runs?token={TOKEN}&a=b+c", HOST)
    assert (got.status, got.headers["location"]) == (303, "/runs?a=b+c")
    (cookie,) = got.cookies
    name, _, value = cookie.partition(";")[0].partition("=")
    assert name == "decodescope-8000"
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert TOKEN not in cookie and len(value) >= 43
    assert ask(app, "/runs", HOST, ("Cookie", f"other=1; {name}={value}")).status == 200


def test_the_address_with_the_token_is_good_for_one_browser():
    app = guard()
    first, second = (ask(app, f"/?token={TOKEN}", HOST) for _ in range(2))
    assert (first.status, second.status) == (303, 401)
    assert not second.cookies
    (cookie,) = first.cookies
    again = ask(app, f"/?token={TOKEN}", HOST, ("Cookie", cookie.partition(";")[0]))
    assert (again.status, again.headers["location"], again.cookies) == (303, "/", [])
    assert ask(app, "/runs", HOST, BEARER).status == 200


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "///evil.example"])
def test_the_redirect_never_leads_to_another_server(path):
    location = ask(guard(), f"{path}?token={TOKEN}", HOST).headers["location"]
    assert re.match(r"/[^/\\]", location)


@pytest.mark.parametrize(
    "cookie",
    [
        "decodescope-8000=",
        f"decodescope-8000={TOKEN}",
        "decodescope-8001=x",
        "=",
        ";;;",
        "decodescope-8000",
        "a" * 5000,
    ],
)
def test_a_cookie_that_was_not_given_opens_nothing(cookie):
    assert ask(guard(), "/runs", HOST, ("Cookie", cookie)).status == 401


def test_a_cookie_of_another_start_opens_nothing():
    (cookie,) = ask(guard(), f"/?token={TOKEN}", HOST).cookies
    assert ask(guard(), "/runs", HOST, ("Cookie", cookie.partition(";")[0])).status == 401


def test_the_token_is_no_part_of_what_access_shows():
    assert TOKEN not in repr(Access(TOKEN, 8000))


@pytest.mark.parametrize("header", [
    ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site"), ("Sec-Fetch-Site", "nonsense"),
    ("Origin", "http://evil.example"), ("Origin", "null"), ("Origin", "http://127.0.0.1:8001"),
    ("Origin", "http://127.0.0.1:8000.evil.example"), ("Origin", ""), ("Origin", "file://127.0.0.1:8000"),
])  # fmt: skip
def test_what_another_sites_page_sends_is_refused_even_with_the_token(header):
    behind = Behind()
    assert post(guard(behind), *ALLOWED, header).status == 403
    assert not behind.asked


@pytest.mark.parametrize(
    "extra",
    [
        [],
        [("Sec-Fetch-Site", "same-origin"), ("Origin", "http://127.0.0.1:8000")],
        [("Sec-Fetch-Site", "none")],
        [("Origin", "https://127.0.0.1:8000")],
    ],
)
def test_scripts_and_the_servers_own_pages_may_send(extra):
    behind = Behind()
    assert post(guard(behind), *ALLOWED, *extra, chunks=(b'{"a"', b": 1}")).status == 200
    assert behind.asked == [("/v1/completions", b'{"a": 1}')]


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
        "text/plain; application/json",
    ],
)
def test_what_a_form_could_send_is_refused(kind):
    headers = (HOST, BEARER) if kind is None else (HOST, BEARER, ("Content-Type", kind))
    assert post(guard(), *headers).status == 415
    assert post(guard(), HOST, BEARER, ("Content-Type", "Application/JSON; charset=utf-8")).status == 200


@pytest.mark.parametrize(
    "target, headers",
    [("/health", (HOST,)), ("/runs", (HOST,)), ("/runs", (HOST, BEARER)), ("/", (("Host", "evil"),))],
)
def test_every_answer_keeps_a_browser_careful_and_none_allows_another_origin(target, headers):
    got = ask(guard(), target, *headers, ("Origin", "http://evil.example"))
    assert "default-src 'self'" in got.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in got.headers["content-security-policy"]
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    assert got.headers["cache-control"] == "no-store"
    assert not [name for name in got.headers if name.startswith("access-control")]


def test_a_body_that_says_that_it_is_too_large_is_not_read():
    behind, chunks = Behind(), (b"x" * 50, b"x" * 51)
    got = post(guard(behind, body_bytes=100), *ALLOWED, ("Content-Length", "101"), chunks=chunks)
    assert (got.status, behind.asked) == (413, [])
    assert json.loads(got.body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("length", ["-1", "1e3", "", "9" * 30, "0x10"])
def test_a_length_that_is_no_length_is_refused(length):
    assert post(guard(), *ALLOWED, ("Content-Length", length)).status == 413


@pytest.mark.parametrize(
    "chunks, status", [((b"x" * 50, b"x" * 50), 200), ((b"x" * 50, b"x" * 51), 413), ((b"x",) * 200, 413)]
)
def test_a_body_in_chunks_is_read_up_to_the_limit(chunks, status):
    behind = Behind()
    assert post(guard(behind, body_bytes=100), *ALLOWED, chunks=chunks).status == status
    assert len(behind.asked) == (status == 200)


def test_a_body_that_lies_about_its_length_is_read_up_to_the_limit():
    got = post(guard(body_bytes=100), *ALLOWED, ("Content-Length", "10"), chunks=(b"x" * 101,))
    assert got.status == 413


def test_a_body_that_drips_is_given_up():
    behind = Behind()
    got = post(guard(behind, body_seconds=0.2), *ALLOWED, chunks=(b"x",) * 100, pause_s=0.05)
    assert (got.status, behind.asked) == (408, [])


def test_what_tells_how_it_is_takes_no_request_its_place():
    async def watch() -> list[int]:
        behind = Behind()
        behind.hold, app = asyncio.Event(), guard(behind, requests=1)
        paths = ["/health", "/metrics", "/metrics", "/runs"]
        open_ones = [asyncio.create_task(asked(app, "GET", path, (HOST, BEARER))) for path in paths]
        await asyncio.sleep(0)
        behind.hold.set()
        return [(await each).status for each in open_ones]

    assert asyncio.run(watch()) == [200, 200, 200, 200]


@pytest.mark.parametrize("waiting", [0, 64, 1000])
def test_as_many_requests_may_be_open_as_may_run_and_wait_and_some_more(waiting):
    assert limits_of(Plan(1 << 20, 8, waiting)).requests > 8 + waiting


def test_no_more_requests_are_open_than_allowed_and_health_and_metrics_still_answer():
    async def flood() -> list[int]:
        behind = Behind()
        behind.hold, app = asyncio.Event(), guard(behind, requests=2)
        open_ones = [asyncio.create_task(asked(app, "GET", "/runs", (HOST, BEARER))) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await asked(app, "GET", "/runs", (HOST, BEARER))
        health = asyncio.create_task(asked(app, "GET", "/health", (HOST,)))
        metrics = asyncio.create_task(asked(app, "GET", "/metrics", (HOST, BEARER)))
        await asyncio.sleep(0)
        behind.hold.set()
        statuses = [
            refused.status,
            (await health).status,
            (await metrics).status,
            *[(await each).status for each in open_ones],
        ]
        return [*statuses, (await asked(app, "GET", "/runs", (HOST, BEARER))).status]

    assert asyncio.run(flood()) == [503, 200, 200, 200, 200, 200]


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard()({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
