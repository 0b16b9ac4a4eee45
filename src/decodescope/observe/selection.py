"""Which inner values are meant: patterns such as `layers.*.resid_post` against the sites that a model has."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from decodescope.errors import InputError
from decodescope.model.config import ModelConfig
from decodescope.probe import BY_NAME, SITES
from decodescope.trace.site_records import address

Place = tuple[str, int | None]  # site and layer; None for embed, final_norm and logits


def places(config: ModelConfig) -> tuple[Place, ...]:
    """Every inner value that a model of this configuration has, in the order of computation."""
    absent = () if config.qk_norm else ("q_norm", "k_norm")
    inner = [site.name for site in SITES if site.per_layer and site.name not in absent]
    outer = [site.name for site in SITES if not site.per_layer]
    layers = [(name, layer) for layer in range(config.num_hidden_layers) for name in inner]
    return (("embed", None), *layers, *((name, None) for name in outer if name != "embed"))


def select(config: ModelConfig, patterns: Iterable[str]) -> frozenset[Place]:
    """The places that any of the patterns names; a bare site name means that site in every layer.

    `*` stands for any characters, and a negative layer counts from the last one. Raises InputError for a
    pattern that names nothing.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    known = places(config)
    by_address = {address(*place): place for place in known}
    chosen: set[Place] = set()
    for pattern in patterns:
        wanted = f"layers.*.{pattern}" if pattern in BY_NAME and BY_NAME[pattern].per_layer else pattern
        exact = by_address.get(wanted)  # a long list of addresses is not matched against all
        found = [exact] if exact else [p for p in known if _matches(p, wanted, config.num_hidden_layers)]
        if not found:
            raise InputError(
                "observe.no_site",
                pattern=pattern,
                layers=config.num_hidden_layers,
                sites=", ".join(dict.fromkeys(site for site, _ in known)),
            )
        chosen.update(found)
    return frozenset(chosen)


def select_layers(config: ModelConfig, chosen: Sequence[str]) -> frozenset[int]:
    """Layers from words like `3`, `-1`, `0-5` or `0,3,7-9`; all layers without any. Raises InputError."""
    return select_numbers(chosen or ("all",), config.num_hidden_layers, "observe.no_layer", "layer")


def select_numbers(words: Sequence[str], count: int, fault: str, name: str) -> frozenset[int]:
    """Numbers below `count` from words like `3`, `-1` for the last, `0-5`, `all` or `0,3,7-9`.

    Raises InputError with the sentence `fault`, the word in it as `name`.
    """
    numbers: set[int] = set()
    for word in map(str.strip, ",".join(words).split(",")):
        found = range(count) if word == "all" else _range(word, count)
        if found is None:
            raise InputError(fault, **{name: word}, last=count - 1)
        numbers.update(found)
    return frozenset(numbers)


def _range(word: str, count: int) -> range | None:
    first, dash, last = word.removeprefix("-").partition("-")
    numbers = [first, last] if dash else [first]
    if not all(number.isdecimal() and len(number) < 19 for number in numbers):
        return None
    start = count - int(first) if word.startswith("-") else int(first)
    stop = int(last) if dash else start
    return range(start, stop + 1) if 0 <= start <= stop < count else None


def _matches(place: Place, pattern: str, layers: int) -> bool:
    site, layer = place
    if fnmatchcase(address(site, layer), pattern):
        return True
    return layer is not None and fnmatchcase(address(site, layer - layers), pattern)
