"""Fetching what a server exports. The text is a stranger's: bounded in size and number, and never trusted."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from decodescope.errors import InputError
from decodescope.monitor.series import MODEL, PREFIX
from decodescope.monitor.servers import SERVERS, TOKEN_VARIABLE, Server

MOST_BYTES = 8 << 20
_MOST_SAMPLES = 20_000  # of names that are ours to read
_MOST_MODELS, _MOST_LETTERS = 16, 200
_LONGEST_LINE = 1 << 14  # the parser takes quadratic time for the labels of one
_SECONDS = 5.0  # for the connection, and for every piece of the answer
_WHOLE_SECONDS = 20.0
_ACCEPT = "text/plain;version=0.0.4"
Samples = Mapping[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Address:
    """Where metrics are fetched, and the token that opens them. `shown` has nothing secret in it."""

    url: httpx2.URL
    token: str | None

    @property
    def shown(self) -> str:
        """The address, for people."""
        return str(self.url.copy_with(username=None, password=None, query=None))


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one kind of server exported at `at` (seconds of a clock that only runs forward)."""

    at: float
    server: Server
    models: tuple[str, ...]
    samples: Samples


def token_from(path: Path) -> str:
    """The token in a file. Raises InputError."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as fault:
        raise InputError(
            "monitor.token_file", path=path, reason=getattr(fault, "strerror", None) or fault
        ) from None
    if not token:
        raise InputError("monitor.token_empty", path=path)
    return token


def address_of(text: str, token: str | None = None) -> Address:
    """`host:port`, or a URL; without a path it is `/metrics`. A `token` in it, as `serve` prints it, is taken out.

    Where there is none, one in the environment is for servers on this machine. Raises InputError.
    """
    try:
        url = httpx2.URL(text if "://" in text else f"http://{text}")
    except (httpx2.InvalidURL, ValueError):
        raise InputError("monitor.url", url=text) from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 1 << 16:
        raise InputError("monitor.url", url=text)
    given = token or url.params.get("token") or (os.environ.get(TOKEN_VARIABLE) if _is_here(url.host) else None)
    path = "/metrics" if url.path in ("", "/") else url.path
    return Address(url.copy_with(path=path, params=url.params.remove("token"), fragment=None), given)


def scrape(address: Address) -> Scrape:
    """What the server exports now. Raises InputError where it cannot be had or is nothing that we can read."""
    return read(_fetched(address), time.monotonic(), address.shown)


def _fetched(address: Address) -> str:
    headers = {"Accept": _ACCEPT, "Accept-Encoding": "identity"}  # what unpacks to gigabytes is not unpacked
    if address.token:
        headers["Authorization"] = f"Bearer {address.token}"
    try:
        with (
            httpx2.Client(timeout=_SECONDS, trust_env=not _is_here(address.url.host)) as client,
            client.stream("GET", address.url, headers=headers) as response,
        ):
            _check_status(response.status_code, address)
            return _text(response, address)
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as fault:
        reason = str(fault) or type(fault).__name__
        raise InputError("monitor.unreachable", url=address.shown, reason=reason) from None


def _is_here(host: str) -> bool:
    """Whether a host is this machine, which no proxy can reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _check_status(status: int, address: Address) -> None:
    if status in (401, 403):
        raise InputError("monitor.token", url=address.shown)
    if status != 200:  # a redirection is not followed: it could lead the token elsewhere
        raise InputError("monitor.status", url=address.shown, status=status)


def _text(response: httpx2.Response, address: Address) -> str:
    content, ends = bytearray(), time.monotonic() + _WHOLE_SECONDS
    for piece in response.iter_raw():
        content += piece
        if len(content) > MOST_BYTES or time.monotonic() > ends:
            raise InputError("monitor.too_much", url=address.shown, most=MOST_BYTES >> 20)
    return content.decode("utf-8", "replace")


def read(text: str, at: float, where: str) -> Scrape:
    """What stands in an exposition. Raises InputError where it is none, or of no server that we know."""
    known = {name for server in SERVERS for name in server.all_names}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    count = 0
    for name, labels, value in _samples(text, where):
        if name in known or name.startswith(PREFIX):
            samples.setdefault(name, []).append((labels, value))
            count += 1
        if count > _MOST_SAMPLES:
            raise InputError("monitor.too_much", url=where, most=MOST_BYTES >> 20)
    server = next((each for each in SERVERS if any(name.startswith(each.prefix) for name in samples)), None)
    if server is None:
        raise InputError("monitor.unknown", url=where, known=", ".join(each.name for each in SERVERS))
    return Scrape(at, server, _models(samples), samples)


def _samples(text: str, where: str) -> Iterator[tuple[str, dict[str, str], float]]:
    if any(len(line) > _LONGEST_LINE for line in text.split("\n")):
        raise InputError("monitor.not_metrics", url=where)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, dict(sample.labels), float(sample.value)
    except Exception:  # whatever the parser meets in a stranger's text
        raise InputError("monitor.not_metrics", url=where) from None


def _models(samples: Samples) -> tuple[str, ...]:
    names = {labels[MODEL][:_MOST_LETTERS] for each in samples.values() for labels, _ in each if MODEL in labels}
    return tuple(sorted(names)[:_MOST_MODELS])
