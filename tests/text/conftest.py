"""The tokenizers under test, and transformers' own of the same files with what a GGUF cannot tell put right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from gguf_files import SpmPair, spm_header, train_sentencepiece
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from decodescope.formats.gguf import GGUFHeader, read_header
from decodescope.text.tokenizer import Tokenizer

Reference = transformers.PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def starter_header(starter_path: Path) -> GGUFHeader:
    return read_header(starter_path)


@pytest.fixture(scope="session")
def small_header(small_path: Path) -> GGUFHeader:
    return read_header(small_path)


@pytest.fixture(scope="session")
def starter(starter_header: GGUFHeader) -> Tokenizer:
    return Tokenizer.from_gguf(starter_header)


@pytest.fixture(scope="session")
def small(small_header: GGUFHeader) -> Tokenizer:
    return Tokenizer.from_gguf(small_header)


@pytest.fixture(params=["starter", "small"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def starter_reference(starter_path: Path) -> Reference:
    reference = transformers.AutoTokenizer.from_pretrained(starter_path.parent, gguf_file=starter_path.name)
    reference.backend_tokenizer.normalizer = NFC()
    return reference


@pytest.fixture(scope="session")
def small_reference(small_path: Path) -> Reference:
    reference = transformers.AutoTokenizer.from_pretrained(small_path.parent, gguf_file=small_path.name)
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = Sequence(splits)
    return reference


@pytest.fixture(scope="session")
def spm_pair(tmp_path_factory: pytest.TempPathFactory) -> SpmPair:
    """A small SentencePiece vocabulary rebuilt from GGUF, and SentencePiece itself."""
    folder = tmp_path_factory.mktemp("spm")
    spm = train_sentencepiece(folder)
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    return Tokenizer.from_gguf(spm_header(folder / "spm.gguf", spm, chat_template=template)), spm


@pytest.fixture(scope="session")
def spm_tokenizer(spm_pair: SpmPair) -> Tokenizer:
    return spm_pair[0]


@pytest.fixture
def with_metadata(small_header: GGUFHeader) -> Callable[..., GGUFHeader]:
    """The small model's header with some `tokenizer.*` values replaced; None removes one."""

    def change(**values: object) -> GGUFHeader:
        metadata = dict(small_header.metadata)
        for name, value in values.items():
            key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
            metadata.pop(key, None)
            if value is not None:
                metadata[key] = value
        return replace(small_header, metadata=metadata)

    return change
