"""How much a text repeats itself, in two figures of the field.

distinct-n: Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models" (arXiv
1510.03055). They divide the distinct n-grams by the tokens; here, as has become usual, by the n-grams, so that 1
means that none comes twice, whatever n is.

rep-n: Welleck et al. 2019, "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319): their seq-rep-n
is 1 - distinct n-grams / n-grams of the generated text, with n = 4 throughout the paper.
"""

from collections.abc import Sequence


def distinct(ids: Sequence[int], n: int) -> float | None:
    """Distinct n-grams / n-grams, in (0, 1]; None where there is no n-gram. Raises ValueError for n below 1."""
    if n < 1:
        raise ValueError(f"an n-gram has at least one token, not {n}")
    grams = list(zip(*(ids[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else None


def repetition_rate(ids: Sequence[int], n: int = 4) -> float | None:
    """The share of n-grams that stood in `ids` before, in [0, 1); None where there is no n-gram.

    Each n-gram is new once and old ever after: so this is 1 - distinct-n. Raises ValueError for n below 1.
    """
    share = distinct(ids, n)
    return None if share is None else 1 - share
