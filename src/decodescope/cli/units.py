"""Figures for people: one way to write each unit."""


def percent(share: float) -> str:
    """A probability as a percentage, with more digits where it is small."""
    value = share * 100
    if value >= 10 or value == 0:
        return f"{value:.1f} %"
    return f"{value:.2f} %" if value >= 0.01 else f"{value:.1e} %"


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
