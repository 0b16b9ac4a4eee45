"""SamplingParams: every sampling setting, checked, each with the place it came from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from decodescope.errors import InputError
from decodescope.sampling.orders import ONLY_WHEN_DRAWING, PRESETS, STAGES, Preset

Origin = Literal["command line", "checkpoint", "default"]

_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "seed": None,
    "sampler": "hf",
    "without": (),
    "penalty_window": None,
}
# What else a generation_config.json may ask for that changes the tokens, and the value that means no.
_NOT_IMPLEMENTED: dict[str, Any] = {
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": None,
    "top_h": None, "encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "min_length": 0,
    "min_new_tokens": None, "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "dola_layers": None,
}  # fmt: skip
_INTEGERS = ("top_k", "no_repeat_ngram_size", "seed", "penalty_window")
_MAY_BE_NONE = ("seed", "penalty_window")
_OWN = ("seed", "sampler", "without", "penalty_window")  # no generation_config.json knows these


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults mean: the most probable token, nothing else.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties of 1 (repetition) or 0 (presence,
    frequency) and n-gram size 0 are off. `sampler` names the order of stages (see `orders`), `without` the stages
    left out to see what they do, `penalty_window` how many of the last tokens the penalties look at (0: all; None:
    as many as the sampler's engine). Raises InputError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    seed: int | None = None
    sampler: str = "hf"
    without: tuple[str, ...] = ()
    penalty_window: int | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # catalogue keys of things worth saying, some as `key:detail`

    def __post_init__(self) -> None:
        _check_names(self.sampler, self.without)
        for name in (*STAGES, *_MAY_BE_NONE):
            _check_type(name, getattr(self, name))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or (name in _ABOVE_ZERO and value == 0):
                raise InputError(f"sampling.{name}", value=value)
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise InputError("sampling.seed", value=self.seed)
        if not 0 <= self.window <= _MOST:
            raise InputError("sampling.penalty_window", value=self.window)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def preset(self) -> Preset:
        return PRESETS[self.sampler]

    @property
    def window(self) -> int:
        """How many of the last tokens the penalties look at; 0: all of them."""
        return self.preset.penalty_window if self.penalty_window is None else self.penalty_window

    def chain(self) -> tuple[str, ...]:
        """The stages in force, in order; those that only shape a draw are off when greedy."""
        off = {*self.without, *(ONLY_WHEN_DRAWING if self.is_greedy else ())}
        return tuple(n for n in self.preset.order if n not in off and getattr(self, n) != _OFF[n])

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, "default")

    def values(self) -> dict[str, float | int | str | None]:
        """Every setting by name, as JSON has it: `without` joined by commas (None: all stages are in force),
        `penalty_window` as a number. `resolve` takes these values back."""
        left_out = ",".join(name for name in self.preset.order if name in self.without)
        values = {name: getattr(self, name) for name in _DEFAULTS}
        return {**values, "without": left_out or None, "penalty_window": self.window}


_OFF = {**_DEFAULTS, "temperature": 1.0}
_MOST = (1 << 31) - 1
_ABOVE_ZERO = ("top_p", "repetition_penalty")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, _MOST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "no_repeat_ngram_size": (0, _MOST),
}


def _check_names(sampler: Any, without: Any) -> None:
    if not isinstance(sampler, str) or sampler not in PRESETS:
        raise InputError("sampling.sampler", value=str(sampler)[:80], known=", ".join(PRESETS))
    for name in without if isinstance(without, tuple) else (without,):
        if name not in STAGES:
            raise InputError("sampling.without", value=str(name)[:80], known=", ".join(STAGES))


def _check_type(name: str, value: Any) -> None:
    whole = type(value) is int
    right = whole if name in _INTEGERS else whole or (type(value) is float and math.isfinite(value))
    if not right and not (name in _MAY_BE_NONE and value is None):
        key = "sampling.not_whole" if name in _INTEGERS else "sampling.not_a_number"
        raise InputError(key, name=name, value=str(value)[:80])


def resolve(given: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> SamplingParams:
    """Join what the caller gave with the checkpoint's generation_config (None: leave that aside).

    A filter without a temperature means temperature 1; a seed alone stays greedy, and a note says so. `without`
    may be a sequence or joined by commas. Raises InputError for an unknown name or an impossible value.
    """
    for name in given:
        if name not in _DEFAULTS:
            raise InputError("sampling.unknown", name=name, known=", ".join(_DEFAULTS))
    values: dict[str, Any] = dict(_DEFAULTS)
    origins: dict[str, Origin] = {}
    for name, value in _of_checkpoint(checkpoint or {}).items():
        values[name], origins[name] = value, "checkpoint"
    try:
        SamplingParams(**values)
    except InputError as fault:
        raise InputError("sampling.checkpoint", reason=fault) from None
    for name, value in given.items():
        if value is not None:
            values[name], origins[name] = _names(value) if name == "without" else value, "command line"
    if _filters_given(values, origins) and "temperature" not in origins:
        values["temperature"] = 1.0
    return SamplingParams(**values, origins=origins, notes=_notes(values, origins, checkpoint))


def _names(value: Any) -> Any:
    """The stage names of a sequence or of a text joined by commas; anything else as it is, to be refused."""
    if isinstance(value, str):
        return tuple(name for name in value.replace(" ", "").split(",") if name)
    return tuple(value) if isinstance(value, Sequence) else value


def _of_checkpoint(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values of a generation_config.json; without `do_sample` its temperature is not in force."""
    found = {name: config[name] for name in _DEFAULTS if config.get(name) is not None and name not in _OWN}
    if config.get("do_sample"):
        return {"temperature": 1.0, **found}
    return {name: value for name, value in found.items() if name not in ONLY_WHEN_DRAWING}


def _filters_given(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> bool:
    """Whether the command line switches on a filter that only shapes a draw."""
    return any(origins.get(n) == "command line" and values[n] != _OFF[n] for n in ONLY_WHEN_DRAWING[1:])


def _notes(
    values: Mapping[str, Any], origins: Mapping[str, Origin], checkpoint: Mapping[str, Any] | None
) -> tuple[str, ...]:
    greedy = values["temperature"] == 0
    notes = {
        "note.temperature_zero": greedy and "temperature" in origins,
        "note.seed_greedy": greedy and values["seed"] is not None,
        "note.filter_greedy": greedy and _filters_given(values, origins),
        "note.filter_temperature": not greedy and "temperature" not in origins,
        "note.no_checkpoint_settings": checkpoint is not None and not _of_checkpoint(checkpoint),
    }
    ignored = ", ".join(
        n for n, off in _NOT_IMPLEMENTED.items() if (checkpoint or {}).get(n, off) not in (off, None)
    )
    about_ignored = ("note.checkpoint_ignored" + ":" + ignored,) if ignored else ()
    return tuple(key for key, holds in notes.items() if holds) + about_ignored
