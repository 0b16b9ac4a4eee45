"""The model that is measured, known by its headers: this process never loads it."""

from dataclasses import dataclass
from pathlib import Path

from decodescope.loading import Loading
from decodescope.model.config import ModelConfig
from decodescope.models import Report, describe, find_model
from decodescope.text.tokenizer import open_tokenizer

_TABLE = "\n".join(f"{n} × 7 = {n * 7}" for n in range(1, 200))  # what comes next is hardly a matter of rounding


@dataclass(frozen=True, slots=True)
class Subject:
    """The model at `path`, a folder or GGUF file, or `random` weights for the shapes of that config.json."""

    name: str
    path: Path
    random: Path | None
    config: ModelConfig
    stored_bytes: dict[str, int]
    ids: tuple[int, ...]  # that prompts are made of

    @property
    def files(self) -> list[Path]:
        """Where the weights lie."""
        if self.random:
            return []
        return sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]

    @property
    def is_gguf(self) -> bool:
        """One GGUF file."""
        return self.random is None and self.path.is_file()


def find_subject(model: str, loading: Loading, report: Report) -> Subject:
    """The model that `model` names, fetched where needed; its tokenizer alone where weights are random. Raises
    InputError.
    """
    files = find_model(model, report)
    report(describe(files))
    weights = loading.weights(files.path)
    ids = tuple(open_tokenizer(files.path).encode(_TABLE))
    random = weights.path if loading.random_weights else None
    return Subject(str(random or files.name), files.path, random, weights.config, weights.stored_bytes(), ids)
