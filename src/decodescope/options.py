"""RunOptions: how to run, in one value that is checked before any work is done."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decodescope.errors import InputError
from decodescope.sampling.params import resolve
from decodescope.text.stream import StopStrings

DEFAULT_CANDIDATES = 50


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: sampling values by name (see `sampling.params`), and everything around them.

    Raises InputError for values that cannot be, before a model is loaded.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_settings: bool = False  # start from the checkpoint's generation_config
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    use_cache: bool = True
    candidates: int = DEFAULT_CANDIDATES  # recorded per step
    save: Path | str | None = None  # run folder; one per row, numbered, where there are several prompts
    keep_logits: bool = False  # store the raw logits of every step in the run folder
    every_logit: bool = False  # compute those of every prompt position, which no token is chosen from

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError("run.max_new_tokens", value=self.max_new_tokens)
        if self.candidates < 1:
            raise InputError("run.candidates", value=self.candidates)
        if self.keep_logits and self.save is None:
            raise InputError("run.keep_needs_save")
        resolve(self.sampling)
        StopStrings(self.stop)


def changed(options: RunOptions, changes: Mapping[str, Any]) -> RunOptions:
    """Options with some changed: by their own names, and sampling values by theirs."""
    own = {name: value for name, value in changes.items() if name in RunOptions.__slots__}
    named = {name: value for name, value in changes.items() if name not in own}
    sampling = {**options.sampling, **own.pop("sampling", {}), **named}
    return replace(options, **own, sampling=sampling)
