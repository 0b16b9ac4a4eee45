"""Faults that are the user's to mend: one clear sentence each, in the reader's language."""

from decodescope.locale import translate


class DecodescopeError(Exception):
    """A fault named by a catalogue key; `str()` is the sentence in the language in force.

    `key` is looked up as `error.{key}` in the locale catalogues; `values` fill its placeholders.
    """

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(key)
        self.key = key
        self.values = values

    def __str__(self) -> str:
        return translate(f"error.{self.key}", **self.values)


class InputError(DecodescopeError):
    """Wrong use or unusable input: the command line exits with code 2."""


class ResourceError(DecodescopeError):
    """The machine ran out of something (memory, disk) in mid-run: exit code 2, results so far kept."""


class FindingError(DecodescopeError):
    """The run itself showed a fault (non-finite logits ...): exit code 1."""
