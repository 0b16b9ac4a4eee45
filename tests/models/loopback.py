"""A server on loopback that serves files, badly when told to."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

Publish = Callable[..., None]
COMMIT = "c0ffee" + "0" * 34


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Server:
    """What is served by path, how, and what was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    break_after: int | None = None  # bytes of body per connection, then the line goes dead
    breaks: int = 1_000  # how often that happens
    ignore_range: bool = False
    refuse_range: bool = False
    shift_range: bool = False  # 206, but from the first byte
    stall_s: float = 0.0  # silence after the first byte
    statuses: list[int] = field(default_factory=list)  # answered first, one each
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range)
    url: str = ""

    def json(self, path: str, value: object) -> None:
        self.files[path] = json.dumps(value).encode()


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path, wanted = unquote(self.path), self.headers.get("Range")
            server.asked.append((path, wanted))
            body = _body(server, path)
            if server.statuses:
                return self._refuse(server.statuses.pop(0))
            if body is None:
                return self._refuse(404)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            if wanted and (server.refuse_range or start >= len(body)):
                return self._refuse(416)
            partial = bool(wanted) and not server.ignore_range
            self.send_response(206 if partial else 200)
            start = 0 if server.shift_range else start
            rest = body[start:] if partial else body
            if partial:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self._send(rest)

        def _refuse(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, body: bytes) -> None:
            limit = server.break_after
            if "/api/" in self.path and "FilePath" not in self.path:
                limit = None
            try:
                if server.stall_s:
                    self.wfile.write(body[:1])
                    time.sleep(server.stall_s)
                    body = body[1:]
                if limit is not None and server.breaks > 0 and len(body) > limit:
                    server.breaks -= 1
                    body = body[:limit]
                    self.close_connection = True
                self.wfile.write(body)
            except OSError:
                self.close_connection = True

    return Handler


def _body(server: Server, path: str) -> bytes | None:
    parts = urlsplit(path)
    query = parse_qs(parts.query)
    if "FilePath" in query:
        return server.files.get(f"{parts.path}?{query['FilePath'][0]}")
    return server.files.get(parts.path)
