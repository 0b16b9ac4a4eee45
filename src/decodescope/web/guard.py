"""The guard in front of everything: who may ask, from where, and how much at once.

Pure ASGI and outermost, so that nothing that is mounted later can be reached around it.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decodescope.web.bodies import BodyFault, Limits, read_body
from decodescope.web.faults import refusal

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WITHOUT_TOKEN, METRICS = "/health", "/metrics"
_UNCOUNTED = (WITHOUT_TOKEN, METRICS)  # they tell how it is, most of all when there is too much
_COOKIE_S = 30 * 24 * 3600  # it dies with the server anyway: the secret is a new one each start
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_DECIDING = ("host", "origin", "authorization", "content-type", "sec-fetch-site")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.ASCII | re.IGNORECASE)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in: `token` opens everything, `hosts` are the names (no ports) the server answers to."""

    token: str = field(repr=False)
    port: int
    hosts: frozenset[str] = LOCAL_NAMES
    limits: Limits = field(default_factory=Limits)

    @property
    def cookie(self) -> str:
        """The cookie's name: cookies are shared by all ports of a host, names are not."""
        return f"decodescope-{self.port}"


class Guard:
    """Lets through what `Access` allows, with headers that keep a browser careful on every answer.

    `/?token=...` is good for one browser: it gets a cookie and the address without the token. Everything else
    needs that cookie or `Authorization: Bearer`; only `/health` does not.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        self._session = secrets.token_urlsafe(32)  # what the cookie holds: not the token
        self._opened = False  # the address with the token has been used
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, send)
        elif scope["path"] in _UNCOUNTED and scope["method"] in _SAFE_METHODS:
            await self._app(scope, receive, send)
        elif self._running >= self._access.limits.requests:
            await refusal(503, "web.too_many_requests", headers={"Retry-After": "1"})(scope, receive, send)
        else:
            self._running += 1
            try:
                await self._pass_on(scope, receive, send)
            finally:
                self._running -= 1

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read what is sent, within the limits, before anyone works with it."""
        if scope["method"] in _SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, self._access.limits)
        except BodyFault as fault:
            await fault.answer(scope, receive, send)
            return
        await self._app(scope, _replaying(body, receive), send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = _headers(scope)
        host = headers.get("host", "") if headers else ""
        if headers is None or _name(host) not in self._access.hosts:
            return refusal(403, "web.host", host=host[:80].encode("ascii", "replace").decode())
        if scope["path"] == WITHOUT_TOKEN and scope["method"] in _SAFE_METHODS:
            return None
        if not self._known(headers):
            return self._exchange(scope) or refusal(401, "web.token", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "GET" and "token" in _query(scope):
            return _without_token(scope)
        return None if scope["method"] in _SAFE_METHODS else _cross_site(headers, host)

    def _known(self, headers: Mapping[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _equal(given.strip(), self._access.token):
            return True
        return _equal(_cookie(headers.get("cookie", ""), self._access.cookie), self._session)

    def _exchange(self, scope: Scope) -> Response | None:
        """The token in the address, once, for a cookie and an address without it."""
        if scope["method"] != "GET" or not _equal(_query(scope).get("token", ""), self._access.token):
            return None
        if self._opened:
            return refusal(401, "web.link_used", headers={"WWW-Authenticate": "Bearer"})
        self._opened = True
        response = _without_token(scope)
        response.set_cookie(
            self._access.cookie, self._session, max_age=_COOKIE_S, httponly=True, samesite="strict", path="/"
        )
        return response


def _headers(scope: Scope) -> Mapping[str, str] | None:
    """Headers by name; None where one that decides was sent twice, which only an attacker does."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in found and key in _DECIDING:
            return None
        found[key] = f"{found[key]}; {text}" if key in found else text  # several cookies
    return found


def _name(host: str) -> str:
    """The name in a Host header, without the port and the brackets of an IPv6 address; "" where there is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _cross_site(headers: Mapping[str, str], host: str) -> Response | None:
    """Refuse what another site's page could have sent, and what is no JSON."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return refusal(403, "web.cross_site")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return refusal(403, "web.cross_site")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return refusal(415, "web.content_type")
    return None


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _without_token(scope: Scope) -> RedirectResponse:
    """To the same page; a path of ours starts with one slash, two would lead to another server."""
    rest = urlencode({name: value for name, value in _query(scope).items() if name != "token"})
    path = "/" + scope["path"].lstrip("/\\")
    return RedirectResponse(f"{path}?{rest}" if rest else path, 303)


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _equal(given: str, secret: str) -> bool:
    """Compared in constant time."""
    return compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *own]
        await send(message)

    return sending


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, and then whatever comes after it."""
    given = False

    async def replaying() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying
