"""GGUF files written byte by byte, lies included; numbers as in ggml's docs/gguf.md."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = ["B", "b", "H", "h", "I", "i", "f", "?", "_", "_", "Q", "q", "d"]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    """A value with its type in front, as it follows a key."""
    return struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value))


def array(kind: int, items: bytes, count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + items


def pair(key: str, value: bytes) -> bytes:
    return text(key) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """An entry of the tensor table; `shape` outermost first, as everywhere in decodescope."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3,
    counts: tuple[int, int] | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    """A whole file; `counts` (tensors, pairs) may differ from what is there."""
    claimed = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def plain_gguf() -> bytes:
    """A small valid file with every kind of entry a header may have."""
    pairs = [
        pair("general.architecture", scalar(STRING, "llama")),
        pair("llama.block_count", scalar(U32, 2)),
        pair("llama.rope.freq_base", scalar(F32, 10000.0)),
        pair("tokenizer.ggml.tokens", array(STRING, text("春") + text("ab") + text(b"\xff"), 3)),
        pair("tokenizer.ggml.token_type", array(I32, struct.pack("<3i", 1, 1, 6), 3)),
        pair("flag", scalar(BOOL, True)),
        pair("octets", array(U8, bytes(range(16)), 16)),
    ]
    tensors = [tensor("output_norm.weight", (8,), 0, 0), tensor("token_embd.weight", (3, 32), 8, 32)]
    return gguf_bytes(pairs, tensors, bytes(range(134)))
