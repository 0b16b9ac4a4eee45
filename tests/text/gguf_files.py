"""Small GGUF files for tests: any tokenizer metadata, and a SentencePiece vocabulary trained on the spot."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece

from decodescope.formats.gguf import GGUFHeader, read_header
from decodescope.text.tokenizer import Tokenizer

WORDS = ["the", "model", "writes", "one", "token", "after", "another", "模型", "一个", "词元", "接着", "übung"]

SpmPair = tuple[Tokenizer, sentencepiece.SentencePieceProcessor]


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **values: Any) -> GGUFHeader:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def train_sentencepiece(folder: Path, **rules: Any) -> sentencepiece.SentencePieceProcessor:
    text = folder / "corpus.txt"
    text.write_text("\n".join(" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spm"), model_type="bpe", vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<tool>"],
        hard_vocab_limit=False, minloglevel=2, **rules,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def spm_header(path: Path, spm: sentencepiece.SentencePieceProcessor, **values: Any) -> GGUFHeader:
    def kind(i: int) -> int:
        control, unknown, byte = spm.IsControl(i), spm.IsUnknown(i), spm.IsByte(i)
        plain = 4 if spm.IdToPiece(i) == "<tool>" else 1
        return 3 if control else 2 if unknown else 6 if byte else plain

    ids = range(spm.GetPieceSize())
    scores = [spm.GetScore(i) for i in ids]
    pieces, kinds = [spm.IdToPiece(i) for i in ids], [kind(i) for i in ids]
    special = {"bos_token_id": spm.bos_id(), "eos_token_id": spm.eos_id(), "unk_token_id": spm.unk_id()}
    return write_gguf(path, "llama", pieces, kinds, token_scores=scores, **special, **values)
