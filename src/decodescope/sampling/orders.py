"""The order in which three engines apply their sampling stages; `docs/sampling.md` names the sources."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """How one engine chooses: its stages in order, and what its penalties look back at.

    A stage that an engine lacks keeps a place that leaves its neighbours as they are there.
    """

    order: tuple[str, ...]
    penalty_window: int = 0  # the last tokens that the three penalties see; 0: all of them
    counts_prompt: bool = False  # presence and frequency penalty count prompt tokens too


PRESETS = {
    "hf": Preset((
        "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
        "temperature", "top_k", "top_p", "min_p",
    )),
    "vllm": Preset((
        "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size",
        "temperature", "min_p", "top_k", "top_p",
    )),
    "llamacpp": Preset((
        "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size",
        "top_k", "top_p", "min_p", "temperature",
    ), penalty_window=64, counts_prompt=True),
}  # fmt: skip
STAGES = PRESETS["hf"].order
ONLY_WHEN_DRAWING = ("temperature", "top_k", "top_p", "min_p")  # none of them moves the most probable token
