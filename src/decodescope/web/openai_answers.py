"""What clients get: OpenAI's answers, with vLLM's names for token ids and a `run_id` that leads to the trace."""

from typing import Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


class CachedTokens(BaseModel):
    """Prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request; an end token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(BaseModel):
    """One alternative. `bytes` are exact, whatever `token` can show of them."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of an answer: natural logarithm of its probability before any sampling setting."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of each token that a choice or a chunk adds."""

    content: list[TokenLogprob]


class Logprobs(BaseModel):
    """The same as `/v1/completions` has it: lists side by side. Offsets count characters of the text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    bytes: list[list[int]] = Field(description="Exact bytes of each token; ours.")


class _Choice(BaseModel):
    index: int
    finish_reason: str | None  # stop, length; in a stream null until the last chunk
    stop_reason: str | None = Field(None, description="vLLM's name: the stop string.")
    stop_guard: str | None = Field(None, description="The guard that ended it.")
    run_id: str = Field(description="Of its trace: /runs/{run_id}, where it is recorded.")
    token_ids: list[int] | None = None


class CompletionChoice(_Choice):
    """One answer, or what a chunk adds to it."""

    text: str
    logprobs: Logprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatMessageOut(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str


class Delta(BaseModel):
    """What a chunk adds; the role stands in the first one."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(_Choice):
    """One answer."""

    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(_Choice):
    """What a chunk adds to an answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class _Answer(BaseModel):
    id: str
    created: int = Field(description="Unix time in seconds.")
    model: str


class Completion(_Answer):
    """The answer of `/v1/completions`, and each chunk of its stream (there usage comes with the last one)."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatCompletion(_Answer):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage


class ChatChunk(_Answer):
    """One chunk of its stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="vLLM's name: tokens of prompt and answer together.")


class ModelList(BaseModel):
    """The answer of `/v1/models`: one model."""

    object: Literal["list"] = "list"
    data: list[Model]
