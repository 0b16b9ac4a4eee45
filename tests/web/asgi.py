"""Speak ASGI to an application: what bytes a client sends, and what it gets."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Headers = dict[str, str]


@dataclass
class Got:
    status: int = 0
    headers: Headers = field(default_factory=dict)
    body: bytes = b""
    cookies: list[str] = field(default_factory=list)


class Behind:
    """The application behind a guard: takes the whole body and says how much it was."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.hold: asyncio.Event | None = None  # answers wait for it

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more and scope["method"] == "POST":
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.asked.append((scope["path"], body))
        if self.hold:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-behind", b"yes")]})
        await send({"type": "http.response.body", "body": b"done"})


async def asked(
    app: Any,
    method: str,
    target: str,
    headers: Sequence[tuple[str, str]],
    chunks: Sequence[bytes] = (),
    pause_s: float = 0,
) -> Got:
    """One request; `chunks` come one by one, each after a pause."""
    path, _, query = target.partition("?")
    waiting, got = list(chunks), Got()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_s)
        if not waiting and chunks:
            return {"type": "http.disconnect"}
        part = waiting.pop(0) if waiting else b""
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            got.status = message["status"]
            for name, value in message["headers"]:
                got.headers[name.decode()] = value.decode()
                if name == b"set-cookie":
                    got.cookies.append(value.decode())
        else:
            got.body += message.get("body", b"")

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": raw,
        "root_path": "",
    }
    await app(scope, receive, send)
    return got
