"""What clients may ask for: OpenAI's fields, our sampling settings, and a few of vLLM's names.

A field that is not here is refused by name: it would change the answer and is not done. Ranges are checked where
the values are used (`options.RunOptions`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 64  # answers to one request: prompts times `n`
_COMPLETION_TOKENS, _CHAT_TOKENS = 16, 1024
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram_size", "seed", "sampler", "without", "penalty_window",
)  # fmt: skip

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
SeveralIds = Annotated[list[Ids], Field(min_length=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Tokens = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """What a stream holds besides the answer."""

    include_usage: bool = False


class Wanted(_Strict):
    """What both kinds of requests share."""

    model: str | None = Field(None, description="As /v1/models says, or left out.")
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="Answers per prompt; answer i draws with seed + i.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
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
    without: list[str] | None = Field(None, description="Stages left out.")
    penalty_window: int | None = None
    ignore_eos: bool = False
    guards: list[str] | None = Field(None, description="Rules as --guard has them, in place of the server's.")
    return_token_ids: bool | None = Field(None, description="vLLM's name: the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="vLLM's name: `token_id:N` in logprobs.")
    user: str | None = Field(None, description="Changes nothing.")

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
    max_tokens: Tokens = _COMPLETION_TOKENS
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
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many alternatives each token comes with; None: no logprobs at all."""
        return self.logprobs


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message; parts of text are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    @property
    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Wanted):
    """`/v1/chat/completions`: the messages go through the model's chat template."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = Field(None, description="The newer name of max_tokens; counts first.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _logprobs_first(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def new_tokens(self) -> int:
        """As of a completion."""
        return self.max_completion_tokens or self.max_tokens or _CHAT_TOKENS

    @property
    def top(self) -> int | None:
        """As of a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None
