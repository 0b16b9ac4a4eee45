"""OpenModel: a model and its tokenizer, loaded; text becomes prompts that are ready to go in."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from decodescope.errors import InputError
from decodescope.loading import Loading
from decodescope.model.checkpoint import Progress
from decodescope.model.streaming import layers_on_disk
from decodescope.model.weights import Weights
from decodescope.models import ModelFiles, Report, find_model, silent
from decodescope.observe.recorder import Speller
from decodescope.sampling.checkpoint import read_checkpoint_settings
from decodescope.text.chat import Prompt, chat_prompt, check_length, ids_prompt, raw_prompt
from decodescope.text.messages import Message, read_messages, read_prompts, with_system
from decodescope.text.tokenizer import Tokenizer, open_tokenizer
from decodescope.trace.records import Run

_MOST_OFFERED = 12  # parts of a text that is several tokens
Prompts = list[Prompt]
ON_DISK = "note.layers_on_disk"


class OpenModel:
    """What a session holds open: `files`, `model`, `weights`, `tokenizer`, the checkpoint's `settings`."""

    def __init__(self, files: ModelFiles, loading: Loading, report: Report, progress: Progress | None) -> None:
        self.files, self.loading, self.weights = files, loading, loading.weights(files.path)
        with ThreadPoolExecutor(1) as beside:  # the vocabulary is read while the weights are
            tokenizer = beside.submit(open_tokenizer, files.path)
            if loading.random_weights:
                self.files = _random_files(files, tokenizer.result(), self.weights)
            if loading.max_memory_bytes is not None:
                tokenizer.result()  # what it takes counts
            self.model = loading.load(self.weights, report, progress)
            self.tokenizer = tokenizer.result()
        self.settings = read_checkpoint_settings(self.files.path)
        self.spell = Speller(self.tokenizer)

    @classmethod
    def open(
        cls,
        model: str = "starter",
        *,
        report: Report = silent,
        progress: Progress | None = None,
        **loading: Any,
    ) -> Self:
        """Find (or fetch) and load a model: see `models.find_model` for what `model` may be.

        How it is held is said by the names of `Loading`: `Session.open("starter", dtype="bfloat16")`. Raises
        InputError.
        """
        how = Loading(**loading)
        return cls(find_model(model, report), how, report, progress)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of a run with such a model should know: catalogue keys."""
        made_up, count = self.loading.random_weights is not None, layers_on_disk(self.model)
        return ("note.random_weights",) * made_up + (f"{ON_DISK}:{count}",) * bool(count)

    @property
    def dtype(self) -> str:
        """What the model computes in: float32, bfloat16 or float16."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.model.config.max_position_embeddings

    @property
    def cache_dtype(self) -> str | None:
        """What a KV cache holds where that is not `dtype`: a name in `model.cache_formats`."""
        return None if self.loading.cache_dtype == self.dtype else self.loading.cache_dtype

    @property
    def held(self) -> dict[str, str | None]:
        """The forms that runs with this model have: the fields of `Run` in `trace.records.HELD`."""
        return {"dtype": self.dtype, "cache_dtype": self.cache_dtype, "weights": self.model.held_as}

    def prompt(self, text: str, *, chat: bool | None = None, system: str | None = None) -> Prompt:
        """A prompt as it goes in: through the chat template where the model has one (`chat` None), or raw.

        Raises InputError for an empty text, for one beyond the context, and for chat with a model that has no
        template.
        """
        if not text:
            raise InputError("text.empty_prompt")
        if chat is False or (chat is None and self.tokenizer.chat_template is None):
            if system is not None:
                raise InputError("chat.system_needs_template")
            return raw_prompt(self.tokenizer, text, self.context)
        return self.chat(with_system([{"role": "user", "content": text}], system))

    def prompt_of(self, ids: Sequence[int]) -> Prompt:
        """Ids as they go in. Raises InputError for none, too many, and one that the model has no row for."""
        check_length(len(ids), self.context)
        return ids_prompt(self.tokenizer, [self.token_id(each) for each in ids])

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as it goes in. Raises InputError as `prompt` does."""
        return chat_prompt(self.tokenizer, messages, self.context)

    def conversation_from(self, path: Path, system: str | None = None) -> Prompt:
        """The conversation in a JSON file, as it goes in. Raises InputError."""
        return self.chat(with_system(read_messages(path), system))

    def prompts_from(self, path: Path, *, chat: bool | None = None, system: str | None = None) -> Prompts:
        """The prompts of a file, a line each (see `text.messages.read_prompts`). Raises InputError."""
        return [
            self.prompt(entry, chat=chat, system=system)
            if isinstance(entry, str)
            else self.chat(with_system(entry, system))
            for entry in read_prompts(path, messages=chat is not False)
        ]

    def token_id(self, token: str | int) -> int:
        """An id, or the id of the one token that puts this text behind another.

        Raises InputError for an id that the model lacks and a text that is several tokens; it offers them.
        """
        rows = self.model.config.vocab_size
        if isinstance(token, int):
            if not 0 <= token < rows:
                raise InputError("fork.id_outside", id=token, last=rows - 1)
            return token
        if not token:
            raise InputError("fork.no_text")
        ids = self.tokenizer.continuation(token)
        if len(ids) != 1:
            offered = ", ".join(f"{self.tokenizer.token_text(each)!r} ({each})" for each in ids[:_MOST_OFFERED])
            more = ", …" if len(ids) > _MOST_OFFERED else ""
            raise InputError("fork.several_tokens", text=token[:80], count=len(ids), tokens=offered + more)
        return ids[0]

    def check_same_model(self, run: Run) -> None:
        """Raise InputError where a run was made with other weights than these, as far as hashes tell."""
        hashes = run.sha256, self.files.sha256
        if run.vocabulary != self.model.config.vocab_size or (all(hashes) and hashes[0] != hashes[1]):
            raise InputError("fork.other_model", run=run.model, model=self.files.name)

    def room(self, sequences: Sequence[Sequence[int]]) -> int:
        """How many tokens the context leaves behind the longest of some sequences of ids, at least one.

        Raises InputError where it leaves none, or where one has an id that the model has no row for.
        """
        context, rows = self.context, self.model.config.vocab_size
        for ids in sequences:
            check_length(len(ids), context)
            if max(ids) >= rows:
                raise InputError("run.id_outside", id=max(ids), rows=rows)
        return context - max(map(len, sequences))


def _random_files(files: ModelFiles, tokenizer: Tokenizer, weights: Weights) -> ModelFiles:
    """What stands for the files of a random model. Raises InputError where it has no rows for some ids."""
    config, size = weights.path, tokenizer.size
    if size > weights.config.vocab_size:
        rows = weights.config.vocab_size
        raise InputError("random.vocabulary", model=files.name, size=size, config=config, rows=rows)
    return ModelFiles(str(config), config, "random", None, None, sum(weights.stored_bytes().values()))
