"""Figures for people: one way to write each unit."""

import re

from decodescope.errors import InputError

_SIZE = re.compile(r"(\d{1,15})\s*(?:([KMGT]i)?B)?", re.ASCII | re.IGNORECASE)


def percent(share: float) -> str:
    """A probability as a percentage; neither a small doubt nor a small chance is rounded away."""
    value = share * 100
    if value in (0, 100):
        return f"{value:.0f} %"
    if value < 0.001:
        return "<0.001 %"
    if value > 99.999:
        return ">99.999 %"
    return f"{value:.{3 if value < 0.01 or value > 99.9 else 2 if value < 10 else 1}f} %"


def share(value: float) -> str:
    """A part of a limit that may be passed, in whole percent."""
    return f"{value * 100:.0f} %"


def number(value: float, digits: int = 3) -> str:
    """A plain figure."""
    return f"{value:.{digits}f}"


def count(value: int) -> str:
    """A whole number with separators."""
    return f"{value:,}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1000:.1f} ms"


def binary_bytes(size: int) -> str:
    """Bytes in the binary unit that fits (MiB = 1024 * 1024 bytes)."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


def billions(value: float) -> str:
    """In units of 10^9: GB of bytes, GFLOP of operations."""
    return number(value / 1e9, 1)


def figure(value: float, digits: int = 3) -> str:
    """A measured figure of any size in few characters: significant digits, no zeros in the exponent."""
    mantissa, mark, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def parsed_bytes(text: str) -> int | None:
    """Bytes from `1GiB`, `64MiB` or a plain number; None where it is none of them."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    power = " kmgt".index(found[2][0].lower()) if found[2] else 0
    return int(found[1]) << 10 * power


def budget_bytes(text: str) -> int:
    """Bytes of a --keep-budget. Raises InputError."""
    size = parsed_bytes(text)
    if size is None:
        raise InputError("forward.keep_budget", value=text)
    return size


def memory_bytes(text: str) -> int:
    """Bytes of a --max-memory. Raises InputError."""
    size = parsed_bytes(text)
    if size is None:
        raise InputError("memory.not_a_size", value=text)
    return size
