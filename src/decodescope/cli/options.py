"""The options that several commands share: the same name means the same everywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from decodescope.cli.units import memory_bytes
from decodescope.locale import translate as t


def option(key: str, *names: str, **more: Any) -> Any:
    """An option whose help is the sentence `help.{key}`."""
    return typer.Option(*names, help=t(f"help.{key}"), show_default=False, **more)


Model = Annotated[str, option("model", "--model", "-m", metavar="MODEL")]
Lang = Annotated[str | None, option("lang", "--lang", metavar="en|zh")]
Json = Annotated[bool, option("json", "--json")]
Dtype = Annotated[str | None, option("dtype", "--dtype", metavar="float32|bfloat16|float16|auto")]
Quantize = Annotated[str, option("quantize", "--quantize", metavar="none|int8|int4|nf4")]
CacheDtype = Annotated[
    str | None, option("cache_dtype", "--cache-dtype", metavar="float32|bfloat16|float16|float8|int8")
]
Device = Annotated[str, option("device", "--device", metavar="NAME")]
RandomWeights = Annotated[Path | None, option("random_weights", "--random-weights", metavar="CONFIG")]
MaxMemory = Annotated[str | None, option("max_memory", "--max-memory", metavar="BYTES")]
LayersOnDisk = Annotated[str, option("layers_on_disk", "--layers-on-disk", metavar="N|all")]
Threads = Annotated[int | None, option("threads", "--threads", metavar="N")]
Engine = Annotated[str, option("engine", "--engine", metavar="NAME")]

Chat = Annotated[bool | None, option("chat", "--chat/--raw")]
System = Annotated[str | None, option("system", "--system", metavar="TEXT")]
Messages = Annotated[Path | None, option("messages", "--messages", metavar="FILE")]
Prompts = Annotated[Path | None, option("prompts", "--prompts", metavar="FILE")]

MaxNewTokens = Annotated[int, option("max_new_tokens", "--max-new-tokens", "-n", metavar="N")]
Stop = Annotated[list[str] | None, option("stop", "--stop", metavar="TEXT")]
IgnoreEos = Annotated[bool, option("ignore_eos", "--ignore-eos")]

Temperature = Annotated[float | None, option("temperature", "--temperature", metavar="T")]
TopK = Annotated[int | None, option("top_k", "--top-k", metavar="K")]
TopP = Annotated[float | None, option("top_p", "--top-p", metavar="P")]
MinP = Annotated[float | None, option("min_p", "--min-p", metavar="P")]
RepetitionPenalty = Annotated[float | None, option("repetition_penalty", "--repetition-penalty", metavar="X")]
PresencePenalty = Annotated[float | None, option("presence_penalty", "--presence-penalty", metavar="X")]
FrequencyPenalty = Annotated[float | None, option("frequency_penalty", "--frequency-penalty", metavar="X")]
NoRepeatNgramSize = Annotated[int | None, option("no_repeat_ngram_size", "--no-repeat-ngram-size", metavar="N")]
Seed = Annotated[int | None, option("seed", "--seed", metavar="N")]
Sampler = Annotated[str | None, option("sampler", "--sampler", metavar="hf|vllm|llamacpp")]
Without = Annotated[list[str] | None, option("without", "--without", metavar="STAGE")]
PenaltyWindow = Annotated[int | None, option("penalty_window", "--penalty-window", metavar="N")]
Guard = Annotated[list[str] | None, option("guard", "--guard", metavar="RULE")]
CheckpointSettings = Annotated[bool, option("checkpoint_settings", "--checkpoint-settings")]

Candidates = Annotated[int | None, option("candidates", "--candidates", metavar="K")]
StepByStep = Annotated[bool, option("step", "--step")]
NoCache = Annotated[bool, option("no_cache", "--no-cache")]
Save = Annotated[Path | None, option("save", "--save", metavar="DIR")]
Layers = Annotated[list[str] | None, option("layers", "--layer", metavar="L|L-M")]
Heads = Annotated[list[str] | None, option("heads", "--head", metavar="H|H-I")]
Positions = Annotated[list[str] | None, option("positions", "--position", metavar="P|P-Q|all")]
Steps = Annotated[int, option("steps", "--steps", "--max-new-tokens", "-n", metavar="N")]
Image = Annotated[Path | None, option("image", "--image", metavar="FILE.png|svg")]
Keep = Annotated[str | None, option("keep", "--keep", metavar="logits")]
KeepBudget = Annotated[str, option("run.keep_budget", "--keep-budget", metavar="BYTES")]
Stages = Annotated[bool, option("stages", "--stages")]
Break = Annotated[list[str] | None, option("break", "--break", metavar="COND")]
ChatLoop = Annotated[bool, option("chat_loop", "--chat-loop")]

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "seed",
    "sampler",
    "without",
    "penalty_window",
)


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings among a command's values; None where the command line says nothing."""
    return {name: None if given[name] == [] else given[name] for name in SAMPLING}


LOADING = ("dtype", "quantize", "cache_dtype", "device", "threads", "random_weights", "layers_on_disk")


def loading_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """How to hold the model, among a command's values. Raises InputError for a limit that is no size."""
    limit = given.get("max_memory")
    size = None if limit is None else memory_bytes(limit)
    return {**{name: given[name] for name in LOADING}, "max_memory_bytes": size}


def prompt_argument(key: str) -> Any:
    """The text argument of a command; `-` reads standard input."""
    return typer.Argument(help=t(f"help.{key}"), show_default=False, metavar=key.rpartition(".")[2].upper())
