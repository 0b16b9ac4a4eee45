"""Every sentence a person reads, in English and Chinese: flat JSON catalogues with `{placeholders}`."""

import json
import locale as system_locale
import os
from functools import cache
from importlib.resources import files

LANGUAGES = ("en", "zh")
_current: list[str] = []


def system_language() -> str:
    """The language of the environment's locale: `zh` for any Chinese one, else `en`."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    name = next(filter(None, names), None) or system_locale.getlocale()[0] or ""
    return "zh" if name.lower().startswith(("zh", "chinese")) else "en"


def language() -> str:
    """The language in force."""
    return _current[0] if _current else system_language()


def set_language(code: str | None) -> None:
    """Speak `en` or `zh` from now on; None goes back to the environment's language."""
    _current[:] = [code] if code else []


@cache
def catalogue(code: str) -> dict[str, str]:
    """All sentences of one language by key."""
    text = files(__package__).joinpath(f"{code}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def translate_or(key: str, fallback: str) -> str:
    """The sentence `key`, or `fallback` where there is none: for names that come out of files."""
    return catalogue(language()).get(key, fallback)


def translate(key: str, **values: object) -> str:
    """The sentence `key` in the language in force, its placeholders filled."""
    return catalogue(language())[key].format(**values)
