"""Which positions of a prompt are meant: words such as `3`, `0-9`, `-1`, `all`."""

from collections.abc import Sequence

from decodescope.errors import InputError


def select_positions(chosen: Sequence[str], count: int) -> frozenset[int]:
    """Positions of a prompt of `count` tokens; `-1` is its last, which is also what none chosen means.

    Words may be joined by commas. Raises InputError for a position that the prompt does not have.
    """
    positions: set[int] = set()
    for word in ",".join(chosen or ("-1",)).split(","):
        positions.update(_positions(word.strip(), count))
    return frozenset(positions)


def _positions(word: str, count: int) -> range:
    if word == "all":
        return range(count)
    first, dash, last = word.removeprefix("-").partition("-")
    numbers = [first, last] if dash else [first]
    if all(number.isdecimal() and len(number) < 19 for number in numbers):
        start = count - int(first) if word.startswith("-") else int(first)
        stop = int(last) if dash else start
        if 0 <= start <= stop < count:
            return range(start, stop + 1)
    raise InputError("positions.unknown", position=word, last=count - 1)
