"""Bars and lines made of block characters."""

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def bar(share: float, cells: int, rest: str = " ") -> str:
    """A bar of `cells` cells, filled in eighths of a cell; the cells after it show `rest`. Empty for NaN."""
    share = 0.0 if math.isnan(share) else share
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * cells * 8), 8)
    filled = "█" * whole + (_EIGHTHS[eighths] if eighths else "")
    return filled.ljust(cells, rest)


def sparkline(values: Sequence[float], cells: int) -> str:
    """A line through `values`, its lowest level the least of them; evenly thinned where they are many."""
    shown = [values[i * len(values) // cells] for i in range(cells)] if len(values) > cells else values
    low, high = min(shown), max(shown)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    return "".join(_LEVELS[round((value - low) / step)] for value in shown)


def stretch(start: float, stop: float, cells: int) -> str:
    """A line of `cells` cells from 0 to 1 on which a stretch stands out, however short."""
    first = min(int(start * cells), cells - 1)
    last = max(math.ceil(stop * cells), first + 1)
    return "░" * first + "█" * (last - first) + "░" * (cells - last)
