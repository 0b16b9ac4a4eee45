"""Where the tensors of a safetensors file lie, for those who read their bytes themselves.

Format: https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the data.
"""

import json
import struct
from pathlib import Path


def tensor_offsets(file: Path) -> dict[str, int]:
    """Tensor name -> its first byte, from the file's start. For files that the library has opened and checked."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }
