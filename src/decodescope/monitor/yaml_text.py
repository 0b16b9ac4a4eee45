"""Plain values as YAML that people like to read: blocks, one value a line, comments where they are given."""

import re
from collections.abc import Iterator, Mapping, Sequence

COMMENT = "#"  # a mapping's key whose value becomes a comment line
# Words, paths, series and times like 15s: nothing that YAML takes for a number, a truth value or a mapping.
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.:-]*[\w/]|[A-Za-z]|\d+(?:ms|[smhd])")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(value: object) -> str:
    """Mappings, sequences, strings of one line, whole numbers and booleans as YAML, with a newline at the end."""
    return "\n".join(_lines(value)) + "\n"


def commented(text: str) -> str:
    """The same lines, switched off."""
    return "".join(f"# {line}\n" for line in text.splitlines())


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield from _mapping(value)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in value:
            first, *others = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _scalar(value)


def _mapping(value: Mapping[str, object]) -> Iterator[str]:
    for key, item in value.items():
        lines = list(_lines(item))
        if key == COMMENT:
            yield f"# {item}"
        elif isinstance(item, str | int) or not item:
            yield f"{key}: {lines[0]}"
        else:
            yield f"{key}:"
            yield from (f"  {line}" for line in lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else "'" + value.replace("'", "''") + "'"
    return "{}" if isinstance(value, Mapping) else "[]"
