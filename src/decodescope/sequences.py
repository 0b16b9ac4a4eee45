"""How far two sequences go together."""

from collections.abc import Sequence


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many entries the two begin with alike: the place where they part, or the end of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))
