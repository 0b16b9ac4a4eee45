"""What clients may ask for: OpenAI's fields, our sampling settings, and a few of vLLM's names.

A field that is not here is refused by name: it would change the answer and is not done. Null is as good as leaving
a field out. Ranges are checked where the values are used (`options.RunOptions`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES = 64  # answers to one request: prompts times `n`
_COMPLETION_TOKENS, _CHAT_TOKENS = 16, 1024
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram_size", "seed", "sampler", "without", "penalty_window",
)  # fmt: skip

# The first fault of a list is enough: a million would take seconds and gigabytes.
_some = Field(min_length=1, fail_fast=True)
_few = Field(max_length=8, fail_fast=True)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], _some]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], _some]
SeveralIds = Annotated[list[Ids], _some]
Stops = Annotated[list[Text], Field(max_length=16, fail_fast=True)]
Few = Annotated[list[str], _few]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Tokens = Annotated[int, Field(ge=1, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, le=MOST_CHOICES)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, given: Any) -> Any:
        """One unknown field is enough, too."""
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        return {unknown[0]: None} if unknown else given


class StreamOptions(_Strict):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None


class Empty(_Strict):
    """An object without fields."""


class TextFormat(_Strict):
    """The form that an answer has anyway."""

    type: Literal["text"]


Nothing = Annotated[list[None], Field(max_length=0)]


class Neutral(_Strict):
    """OpenAI's fields that are taken with the values by which they change nothing; others are not supported."""

    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    functions: Nothing | None = None
    logit_bias: Empty | None = None
    metadata: Empty | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    suffix: Literal[""] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: Nothing | None = None


class Wanted(Neutral):
    """What both kinds of requests share."""

    model: str | None = Field(None, description="As /v1/models says, or left out.")
    n: Count | None = Field(None, description="Answers per prompt, 1 unless given; answer i draws with seed + i.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | Stops | None = None
    temperature: float | None = Field(None, description="1 where it is left out; 0 takes the most probable token.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    seed: int | None = None
    sampler: str | None = Field(None, description="Whose order of stages: hf, vllm or llamacpp.")
    without: Few | None = Field(None, description="Stages left out.")
    penalty_window: int | None = None
    ignore_eos: bool | None = None
    guards: Few | None = Field(None, description="Rules as --guard has them, in place of the server's.")
    return_token_ids: bool | None = Field(None, description="vLLM's name: the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="vLLM's name: `token_id:N` in logprobs.")
    user: str | None = Field(None, description="Changes nothing.")

    @property
    def answers(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling values by name; a temperature is always among them."""
        given = {name: getattr(self, name) for name in SAMPLING}
        return {**given, "temperature": 1.0 if self.temperature is None else self.temperature}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(Wanted):
    """`/v1/completions`: the prompt goes in as it is, without a chat template."""

    prompt: Text | Ids | Texts | SeveralIds = Field(description="A text, its ids, or a list of either.")
    max_tokens: Tokens | None = Field(None, description="16 unless given.")
    logprobs: TopLogprobs | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, one or many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    @property
    def new_tokens(self) -> int:
        """How long an answer may get."""
        return self.max_tokens or _COMPLETION_TOKENS

    @property
    def top(self) -> int | None:
        """How many alternatives each token comes with; None: no logprobs at all."""
        return self.logprobs


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class NeutralMessage(_Strict):
    """What an answer holds besides, as OpenAI's client sends it back."""

    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: Nothing | None = None


class ChatMessage(NeutralMessage):
    """One message; parts of text are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Wanted):
    """`/v1/chat/completions`: the messages go through the model's chat template."""

    messages: Annotated[list[ChatMessage], _some]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = Field(None, description="The newer name of max_tokens; counts first.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "needs logprobs")
        return top

    @property
    def new_tokens(self) -> int:
        """As of a completion."""
        return self.max_completion_tokens or self.max_tokens or _CHAT_TOKENS

    @property
    def top(self) -> int | None:
        """As of a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None
