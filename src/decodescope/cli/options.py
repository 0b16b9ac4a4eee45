"""The options that several commands share: the same name means the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from decodescope.locale import translate as t


def _option(key: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=t(f"help.{key}"), show_default=False, **more)


Model = Annotated[str, _option("model", "--model", "-m", metavar="MODEL")]
Lang = Annotated[str | None, _option("lang", "--lang", metavar="en|zh")]
Json = Annotated[bool, _option("json", "--json")]
Dtype = Annotated[str | None, _option("dtype", "--dtype", metavar="float32|bfloat16|float16")]
Device = Annotated[str, _option("device", "--device", metavar="NAME")]
Threads = Annotated[int | None, _option("threads", "--threads", metavar="N")]
Engine = Annotated[str, _option("engine", "--engine", metavar="NAME")]

Chat = Annotated[bool | None, _option("chat", "--chat/--raw")]
System = Annotated[str | None, _option("system", "--system", metavar="TEXT")]
Messages = Annotated[Path | None, _option("messages", "--messages", metavar="FILE")]
Prompts = Annotated[Path | None, _option("prompts", "--prompts", metavar="FILE")]

MaxNewTokens = Annotated[int, _option("max_new_tokens", "--max-new-tokens", "-n", metavar="N")]
Stop = Annotated[list[str] | None, _option("stop", "--stop", metavar="TEXT")]
IgnoreEos = Annotated[bool, _option("ignore_eos", "--ignore-eos")]

Temperature = Annotated[float | None, _option("temperature", "--temperature", metavar="T")]
TopK = Annotated[int | None, _option("top_k", "--top-k", metavar="K")]
TopP = Annotated[float | None, _option("top_p", "--top-p", metavar="P")]
MinP = Annotated[float | None, _option("min_p", "--min-p", metavar="P")]
RepetitionPenalty = Annotated[float | None, _option("repetition_penalty", "--repetition-penalty", metavar="X")]
PresencePenalty = Annotated[float | None, _option("presence_penalty", "--presence-penalty", metavar="X")]
FrequencyPenalty = Annotated[float | None, _option("frequency_penalty", "--frequency-penalty", metavar="X")]
NoRepeatNgramSize = Annotated[int | None, _option("no_repeat_ngram_size", "--no-repeat-ngram-size", metavar="N")]
Seed = Annotated[int | None, _option("seed", "--seed", metavar="N")]
CheckpointSettings = Annotated[bool, _option("checkpoint_settings", "--checkpoint-settings")]

Candidates = Annotated[int | None, _option("candidates", "--candidates", metavar="K")]
StepByStep = Annotated[bool, _option("step", "--step")]
NoCache = Annotated[bool, _option("no_cache", "--no-cache")]
Save = Annotated[Path | None, _option("save", "--save", metavar="DIR")]
Layers = Annotated[list[str] | None, _option("layers", "--layer", metavar="L|L-M")]
Heads = Annotated[list[str] | None, _option("heads", "--head", metavar="H|H-I")]
Positions = Annotated[list[str] | None, _option("positions", "--position", metavar="P|P-Q|all")]
Steps = Annotated[int, _option("steps", "--steps", "--max-new-tokens", "-n", metavar="N")]
Image = Annotated[Path | None, _option("image", "--image", metavar="FILE.png|svg")]
Keep = Annotated[str | None, _option("keep", "--keep", metavar="logits")]

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
)


def prompt_argument(key: str) -> Any:
    """The text argument of a command; `-` reads standard input."""
    return typer.Argument(help=t(f"help.{key}"), show_default=False, metavar=key.rpartition(".")[2].upper())
