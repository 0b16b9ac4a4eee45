"""Which positions of a prompt are meant: words such as `3`, `0-9`, `-1`, `all`."""

from collections.abc import Sequence

from decodescope.observe.selection import select_numbers


def select_positions(chosen: Sequence[str], count: int) -> frozenset[int]:
    """Positions of a prompt of `count` tokens; `-1` is its last, which is also what none chosen means.

    Words may be joined by commas. Raises InputError for a position that the prompt does not have.
    """
    return select_numbers(chosen or ("-1",), count, "positions.unknown", "position")
