"""Where a server listens, who may come, and with which token: checked before a model is loaded."""

import errno
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decodescope.errors import InputError
from decodescope.monitor.servers import TOKEN_VARIABLE
from decodescope.web.guard import LOCAL_NAMES

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_LEAST_TOKEN = 16  # characters, where others than this machine can try


@dataclass(frozen=True, slots=True)
class Listening:
    """A port that is taken, on which nothing is heard yet. `made_token`: the user gave none."""

    socket: socket.socket
    host: str
    port: int
    token: str
    made_token: bool
    hosts: frozenset[str]

    @property
    def url(self) -> str:
        """Where a browser on this machine goes; with the token where the user does not know it."""
        wildcard = _is_wildcard(self.host)
        name = "127.0.0.1" if wildcard else self.host
        base = f"http://[{name}]:{self.port}/" if ":" in name else f"http://{name}:{self.port}/"
        return f"{base}?token={self.token}" if self.made_token else base


def listen(host: str, port: int, token: str | None, allowed: Sequence[str]) -> Listening:
    """Take the port (0: a free one). `token` None: the one of the environment, or a new one of 256 bits.

    Raises InputError for a token that no header can carry, for an address that others can reach without a token
    of the user's own, and for a port that cannot be had.
    """
    given = _given(token, os.environ)
    local = _is_local(host)
    if given is not None and not (given.isascii() and given.isprintable() and given and " " not in given):
        raise InputError("web.token_characters")
    if not local and (given is None or len(given) < _LEAST_TOKEN):
        raise InputError("web.token_needed", host=host, variable=TOKEN_VARIABLE, least=_LEAST_TOKEN)
    for name in allowed:
        if not name or not (_is_address(name) or _NAME.fullmatch(name)):
            raise InputError("web.allow_host", name=name[:80])
    names = LOCAL_NAMES | {name.lower() for name in allowed} | (set() if _is_wildcard(host) else {host.lower()})
    taken = _taken(host, port)
    return Listening(taken, host, taken.getsockname()[1], given or secrets.token_urlsafe(32), given is None, names)


def write_token(path: Path, token: str) -> None:
    """The token in a file that only its owner can read, whatever was there before. Raises InputError."""
    if not path.name:  # `.` or `/`
        raise InputError("web.token_file", path=path, reason=os.strerror(errno.EISDIR))
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token)
        new.replace(path)
    except OSError as fault:
        new.unlink(missing_ok=True)
        raise InputError("web.token_file", path=path, reason=fault.strerror or fault) from None


def _given(token: str | None, environment: Mapping[str, str]) -> str | None:
    return environment.get(TOKEN_VARIABLE) or None if token is None else token


def _taken(host: str, port: int) -> socket.socket:
    """A bound socket. A port in use is a fault now, not after a model was loaded for minutes."""
    if not 0 <= port <= 65535:
        raise InputError("web.port", port=port)
    made: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, UnicodeError) as fault:
        if made is not None:
            made.close()
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise InputError("web.cannot_listen", host=host, port=port, reason=reason or fault) from None
    return made


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    """Whether only this machine can come in."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_wildcard(host: str) -> bool:
    return host == "" or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
