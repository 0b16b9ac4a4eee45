"""Waiting for others: how long, and how to say in one phrase why nothing came."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from decodescope.locale import translate
from decodescope.models.records import SourceFault


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for a connection and for the next bytes, and how often to try again.

    `attempts` counts broken connections in a row that brought fewer than `gain_bytes`, `pause_s` apart.
    `look_up_s` bounds a whole look-up, the operating system's name resolution included.
    """

    connect_s: float = 5.0
    read_s: float = 30.0
    attempts: int = 4
    gain_bytes: int = 1 << 16
    pause_s: float = 0.5
    look_up_s: float = 8.0

    def timeout(self) -> httpx2.Timeout:
        """The same for the HTTP library."""
        return httpx2.Timeout(self.read_s, connect=self.connect_s)


PATIENT = Patience()
Answer = TypeVar("Answer")


def look_up(host: str, ask: Callable[[], Answer], patience: Patience = PATIENT) -> Answer:
    """The answer of `ask`, or SourceFault when `host` cannot be reached in time.

    The question runs in a thread of its own, since name resolution heeds no timeout.
    """
    outcome: list[Answer | BaseException] = []

    def run() -> None:
        try:
            outcome.append(ask())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience.look_up_s)
    answer = outcome[0] if outcome else httpx2.ConnectTimeout("")
    if isinstance(answer, httpx2.RequestError | httpx2.InvalidURL):
        raise SourceFault("pull.unreachable", host=host, reason=reason(answer))
    if isinstance(answer, BaseException):
        raise answer
    return answer


def reason(error: BaseException) -> str:
    """Why a connection failed, as a phrase in the reader's language where we know one."""
    if isinstance(error, httpx2.TimeoutException):
        return translate("pull.reason.timeout")
    if _caused_by(error, socket.gaierror):
        return translate("pull.reason.name")
    if _caused_by(error, ConnectionRefusedError):
        return translate("pull.reason.refused")
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return translate("pull.reason.broken")
    return str(error) or type(error).__name__


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
