"""The GGUF header: equal to what gguf.GGUFReader reads; a hostile file costs one sentence, little time and memory."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_gguf import (
    ARRAY,
    BOOL,
    F32,
    I8,
    STRING,
    U8,
    U32,
    array,
    gguf_bytes,
    pair,
    plain_gguf,
    scalar,
    tensor,
    text,
)

from decodescope.errors import InputError
from decodescope.formats.gguf import BLOCK_TYPES, GGUFHeader, is_gguf, read_header


@pytest.fixture
def read(tmp_path: Path):
    def read(data: bytes) -> GGUFHeader:
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        return read_header(path)

    return read


def fault(read, data: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        read(data)
    sentence = str(caught.value)
    assert "m.gguf" in sentence and "\n" not in sentence and len(sentence) < 600
    return caught.value


def assert_equal_to_reader(path: Path) -> GGUFHeader:
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    contents = {name: f.contents() for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in ours.metadata.items()}
    assert found == contents
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for expected in theirs.tensors:
        info = ours.tensors[expected.name]
        assert info.shape == tuple(reversed(expected.shape.tolist()))
        assert (info.block_type, info.offset, info.bytes) == (
            expected.tensor_type.name, expected.data_offset, expected.n_bytes,
        )  # fmt: skip
    return ours


def test_the_small_models_header_equals_what_GGUFReader_reads(small_path):
    assert assert_equal_to_reader(small_path).architecture == "llama"


def write_every_kind(path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_custom_alignment(alignment)
    kinds = gguf.GGUFValueType
    for kind, value in (
        (kinds.UINT8, 255), (kinds.INT8, -128), (kinds.UINT16, 65535), (kinds.INT16, -32768),
        (kinds.UINT32, 2**32 - 1), (kinds.INT32, -(2**31)), (kinds.UINT64, 2**64 - 1), (kinds.INT64, -(2**63)),
        (kinds.FLOAT32, 0.1), (kinds.FLOAT64, 0.1), (kinds.BOOL, True), (kinds.STRING, "春天 \U0001f600\0"),
    ):  # fmt: skip
        writer.add_key_value(f"one.{kind.name}", value, kind)
        if kind is not kinds.STRING:
            writer.add_key_value(f"many.{kind.name}", [value] * 3, kinds.ARRAY, sub_type=kind)
    writer.add_array("many.STRING", ["", "a", "龘"])
    writer.add_string("empty", "")
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(24, dtype=np.float16).reshape(2, 3, 2, 2))
    for kind in gguf.GGMLQuantizationType:
        if kind in quants._type_traits:
            width = gguf.GGML_QUANT_SIZES[kind][1]
            writer.add_tensor(f"q.{kind.name}", np.zeros((3, 2 * width), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_every_kind_of_value_and_tensor_equals_what_GGUFReader_reads(tmp_path, alignment):
    write_every_kind(tmp_path / "every.gguf", alignment)
    header = assert_equal_to_reader(tmp_path / "every.gguf")
    assert header.metadata["one.UINT64"] == 2**64 - 1
    assert header.metadata["one.BOOL"] is True


def test_the_block_table_is_ggmls_for_every_type_that_gguf_can_dequantise():
    ours = {name: (values, width) for name, values, width in BLOCK_TYPES.values()}
    theirs = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    needed = {kind.name for kind in quants._type_traits} | {"F32", "F16"}
    assert needed == ours.keys()
    assert ours == {name: theirs[name] for name in ours}
    assert {kind: entry[0] for kind, entry in BLOCK_TYPES.items()} == {
        kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.name in ours
    }


def test_the_plain_file_reads_as_written(read):
    header = read(plain_gguf())
    assert header.of_architecture("block_count") == 2
    assert header.of_architecture("absent", 7) == 7
    assert header.metadata["tokenizer.ggml.tokens"] == ["春", "ab", "�"]
    assert header.tensors["token_embd.weight"].shape == (3, 32)


def test_a_file_cut_off_anywhere_is_refused_in_one_sentence(read):
    whole = plain_gguf()
    keys = {fault(read, whole[:length]).key for length in range(len(whole))}
    assert keys == {"gguf.empty", "gguf.magic", "gguf.truncated", "gguf.tensor_outside"}


def test_an_empty_file_says_so(read):
    assert fault(read, b"").key == "gguf.empty"


def test_a_missing_file_and_a_folder_say_that_they_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(InputError) as caught:
            read_header(path)
        assert caught.value.key == "gguf.unreadable" and str(path) in str(caught.value)


KEY = pair("k", scalar(U32, 1))
TENSOR = tensor("t", (8,), 0, 0)
BYTES = bytes(32)
DAMAGED = {
    "magic": (b"GGML" + plain_gguf()[4:], "gguf.magic"),
    "magic of a zip": (b"PK\3\4" + bytes(60), "gguf.magic"),
    "version 1": (gguf_bytes([KEY], [TENSOR], BYTES, version=1), "gguf.version"),
    "version 4": (gguf_bytes([KEY], [TENSOR], BYTES, version=4), "gguf.version"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "gguf.version"),
    "2^60 pairs": (gguf_bytes([KEY], [], counts=(0, 1 << 60), alignment=1), "gguf.truncated"),
    "2^64 - 1 pairs": (gguf_bytes([], [], BYTES, counts=(0, (1 << 64) - 1)), "gguf.duplicate"),
    "2^60 tensors": (gguf_bytes([KEY], [TENSOR], BYTES, counts=(1 << 60, 1)), "gguf.truncated"),
    "2^40 octets": (gguf_bytes([pair("a", array(U8, BYTES, 1 << 40))], []), "gguf.truncated"),
    "2^64 - 1 floats": (gguf_bytes([pair("a", array(F32, BYTES, (1 << 64) - 1))], []), "gguf.truncated"),
    "2^40 strings": (gguf_bytes([pair("a", array(STRING, text(""), 1 << 40))], []), "gguf.truncated"),
    "a string of 2^63 bytes": (gguf_bytes([text("k") + struct.pack("<IQ", STRING, 1 << 63)], []), "gguf.truncated"),
    "an array in an array": (
        gguf_bytes([pair("a", array(ARRAY, struct.pack("<IQ", U8, 0) * 2, 2))], []), "gguf.bad_value_type",
    ),
    "a value of type 99": (gguf_bytes([text("k") + struct.pack("<II", 99, 0)], []), "gguf.bad_value_type"),
    "an array of type 99": (gguf_bytes([pair("a", array(99, BYTES, 2))], []), "gguf.bad_value_type"),
    "a key twice": (gguf_bytes([KEY, KEY], [TENSOR], BYTES), "gguf.duplicate"),
    "a tensor twice": (gguf_bytes([KEY], [TENSOR, TENSOR], BYTES), "gguf.duplicate"),
    "five dimensions": (gguf_bytes([], [tensor("t", (1, 1, 1, 1, 8), 0, 0)], BYTES), "gguf.dimensions"),
    "2^31 dimensions": (gguf_bytes([], [text("t") + struct.pack("<I", 1 << 31)], BYTES), "gguf.dimensions"),
    "no dimension": (gguf_bytes([], [tensor("t", (), 0, 0)], BYTES), "gguf.shape"),
    "a dimension of 0": (gguf_bytes([], [tensor("t", (4, 0), 0, 0)], BYTES), "gguf.shape"),
    "a row of half a block": (gguf_bytes([], [tensor("t", (2, 16), 8, 0)], BYTES), "gguf.shape"),
    "2^240 values": (gguf_bytes([], [tensor("t", (1 << 60,) * 4, 0, 0)], BYTES), "gguf.tensor_outside"),
    "an unknown block type": (gguf_bytes([], [tensor("t", (8,), 4, 0)], BYTES), "gguf.block_type"),
    "a tensor one byte too long": (gguf_bytes([], [TENSOR], BYTES[1:]), "gguf.tensor_outside"),
    "an offset of 2^64 - 1": (gguf_bytes([], [tensor("t", (8,), 0, (1 << 64) - 1)], BYTES), "gguf.tensor_outside"),
    "a name of 100,000 letters": (gguf_bytes([], [tensor("x" * 100_000, (8,), 4, 0)], BYTES), "gguf.block_type"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused_by_name(read, name):
    data, key = DAMAGED[name]
    assert fault(read, data).key == key


@pytest.mark.parametrize(
    "value",
    [scalar(U32, 0), scalar(U32, 24), scalar(U32, 1 << 21), scalar(BOOL, True), scalar(STRING, "32"),
     scalar(F32, 32.0), scalar(I8, -32), array(U8, b"\x20", 1)],
)  # fmt: skip
def test_an_impossible_alignment_is_refused(read, value):
    assert fault(read, gguf_bytes([pair("general.alignment", value)], [TENSOR], BYTES)).key == "gguf.alignment"


def test_version_2_is_read_and_a_tensor_may_end_at_the_last_byte(read):
    header = read(gguf_bytes([KEY], [TENSOR], BYTES, version=2))
    assert header.tensors["t"].offset + header.tensors["t"].bytes == header.path.stat().st_size


def test_a_file_is_known_as_gguf_by_its_name_or_its_magic(tmp_path):
    (tmp_path / "blob").write_bytes(plain_gguf())
    (tmp_path / "note.txt").write_bytes(b"GG")
    assert is_gguf(tmp_path / "blob") and is_gguf(tmp_path / "NONE.GGUF")
    assert not is_gguf(tmp_path / "note.txt")


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The plain file with bytes changed, 8-byte numbers replaced, pieces cut out, repeated or moved, its end cut."""
    data = bytearray(plain_gguf())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                number = draw(st.sampled_from([0, 1, 255, 1 << 20, 1 << 31, 1 << 40, 1 << 60, (1 << 64) - 1]))
                data[at : at + 8] = struct.pack("<Q", number)
            case 2:
                other = draw(st.integers(0, len(data)))
                data[at:at] = data[min(at, other) : max(at, other)]
            case 3:
                del data[at : at + draw(st.integers(1, 40))]
            case 4:
                del data[at:]
    return bytes(data)


@settings(max_examples=600, derandomize=True, deadline=1000)
@given(mutated())
def test_a_mutated_file_is_read_or_refused_in_one_sentence(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except InputError as error:
        assert "mutated.gguf" in str(error) and "{" not in str(error)
        return
    assert all(info.offset + info.bytes <= len(data) for info in header.tensors.values())


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        read_header(path)
    except InputError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


SIZE = 1 << 18
HUNGRY = {
    "claims of 2^60": gguf_bytes([KEY], [TENSOR], bytes(SIZE), counts=(1 << 60, 1 << 60)),
    "2^40 octets claimed": gguf_bytes([pair("a", array(U8, bytes(SIZE), 1 << 40))], []),
    "negative octets": gguf_bytes([pair("a", array(I8, b"\x80" * SIZE, SIZE))], []),
    "empty strings": gguf_bytes([pair("a", array(STRING, bytes(SIZE), SIZE // 8))], []),
    "strings of two": gguf_bytes([pair("a", array(STRING, text("ab") * (SIZE // 10), SIZE // 10))], []),
    "one string of broken UTF-8": gguf_bytes([pair("a", scalar(STRING, b"\xff" * SIZE))], []),
    "tensors without a name": gguf_bytes([], [tensor("", (), 0, 0)] * (SIZE // 24)),
}  # fmt: skip


@pytest.mark.parametrize("name", HUNGRY)
def test_memory_stays_within_what_the_file_justifies(tmp_path, name):
    path = tmp_path / "hungry.gguf"
    path.write_bytes(HUNGRY[name])
    # The worst case is an array of negative octets: each becomes a Python integer of 32 bytes and its place.
    assert peak_bytes(path) < 44 * len(HUNGRY[name])
