"""Write a model as a GGUF file whose matrices all have one format: BF16, F16, Q8_0 or Q4_0, for comparisons.

From a GGUF model: its metadata copied, its numbers unpacked and packed again. A tied head stays tied, and a head
that llama.cpp's quantiser stored beside the same embedding is tied again, by the finer of the two. In a Q4_0 file
embedding and head are Q8_0.

With `--random-weights CONFIG` the shape is that of a config.json (Qwen2) and the weights are random; what else the
file needs, the vocabulary above all, is the model's, filled up.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderTensor, quants
from numpy.typing import NDArray

from decodescope.model.config import ModelConfig
from decodescope.model.random_weights import RandomWeights
from decodescope.models import find_model

FILE_TYPES = {
    "BF16": LlamaFileType.MOSTLY_BF16,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_SAME = 0.1  # two matrices that differ by less, relative to their norms, are one that was rounded twice
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that can be read: its shape, outermost dimension first."""

    shape: tuple[int, ...]
    read: Callable[[], Values]


def stored(reader: GGUFReader) -> dict[str, Source]:
    """Every tensor of a file by name; a head that is the embedding once."""
    found = {tensor.name: tensor for tensor in reader.tensors}
    sources = {
        name: Source(tuple(map(int, reversed(tensor.shape))), partial(_unpacked, tensor))
        for name, tensor in found.items()
    }
    if HEAD in found and sources[HEAD].shape == sources[EMBEDDING].shape:
        embedding, head = sources[EMBEDDING].read(), sources[HEAD].read()
        if np.linalg.norm(embedding - head) < _SAME * np.linalg.norm(head):
            finer = max((EMBEDDING, HEAD), key=lambda name: int(found[name].n_bytes))
            sources[EMBEDDING] = sources[finer]
            del sources[HEAD]
    return sources


def _unpacked(tensor: ReaderTensor) -> Values:
    values: Values = quants.dequantize(tensor.data, tensor.tensor_type)
    return values


def random(weights: RandomWeights) -> dict[str, Source]:
    """Every tensor of a random model under its GGUF name."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, weights.config.num_hidden_layers)

    def read(name: str) -> Values:
        values: Values = weights.read(name, torch.float32).numpy()
        return values

    sources: dict[str, Source] = {}
    for name, shape in weights.config.tensor_shapes():
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise SystemExit(f"GGUF has no name for {name}")
        sources[renamed] = Source(shape, partial(read, name))
    return sources


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, vocabulary: int, leave_out: str) -> None:
    """All keys but those that the writer has itself or that begin with `leave_out`; tokens filled up."""
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture", "general.file_type", leave_out)):
            continue
        value, kind = field.contents(), field.types[0]
        if field.name.startswith("tokenizer.ggml.token") and kind == GGUFValueType.ARRAY:
            value = [*value, *_filling(field.name, vocabulary - len(value))]
        writer.add_key_value(field.name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)


def _filling(key: str, count: int) -> Iterator[str | int]:
    """Names for rows that no token has, or their type: unused."""
    for number in range(count):
        yield f"[PAD{number}]" if key.endswith("tokens") else gguf.TokenType.UNUSED


def add_shape(writer: GGUFWriter, config: ModelConfig) -> None:
    """The keys that a configuration decides. Ends the program for what it cannot say."""
    if config.architecture != "Qwen2ForCausalLM" or config.rope.kind != "default" or config.windows:
        raise SystemExit("random weights are written for plain Qwen2 configurations only")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


def kind_of(name: str, source: Source, wanted: str) -> GGMLQuantizationType:
    """What a tensor is written in: vectors in float32."""
    if len(source.shape) < 2:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType["Q8_0" if wanted == "Q4_0" and name in (EMBEDDING, HEAD) else wanted]


def packed(values: Values, kind: GGMLQuantizationType) -> NDArray[np.generic]:
    """The content of a tensor in a format."""
    if kind == GGMLQuantizationType.BF16:  # numpy takes minutes for a large model
        content: NDArray[np.generic] = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
        return content
    return quants.quantize(values, kind)


def write_tensors(writer: GGUFWriter, sources: dict[str, Source], wanted: str) -> None:
    """One after the other, so that one of them in float32 is all that must fit in memory."""
    kinds = {name: kind_of(name, source, wanted) for name, source in sources.items()}
    for name, source in sources.items():
        size = math.prod(quants.quant_shape_to_byte_shape(source.shape, kinds[name]))
        writer.add_tensor_info(name, source.shape, np.dtype(np.float32), size, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in sources.items():
        writer.write_tensor_data(packed(source.read(), kinds[name]))
        print(f"{name} {kinds[name].name}", flush=True)


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="starter", help="a GGUF model")
    parser.add_argument("--to", choices=FILE_TYPES, required=True)
    parser.add_argument("--random-weights", type=Path, metavar="CONFIG")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    reader = GGUFReader(find_model(given.model).path)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None
    writer = GGUFWriter(given.out, architecture.contents())
    writer.add_file_type(FILE_TYPES[given.to])
    if given.random_weights is None:
        copy_metadata(reader, writer, 0, "general.file_type")
        write_tensors(writer, stored(reader), given.to)
    else:
        weights = RandomWeights(given.random_weights)
        add_shape(writer, weights.config)
        copy_metadata(reader, writer, weights.config.vocab_size, f"{architecture.contents()}.")
        write_tensors(writer, random(weights), given.to)
    writer.close()


if __name__ == "__main__":
    main()
