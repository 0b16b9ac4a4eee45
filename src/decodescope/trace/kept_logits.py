"""The raw logits that `--keep logits` left in a run folder, read one step at a time and without torch."""

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodescope.errors import InputError
from decodescope.trace.saved import read_outline, saved_tensors
from decodescope.trace.tensors import SavedTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]


def kept_logits(folder: Path) -> "KeptLogits":
    """The raw logits of a saved run by node, none where they were not kept.

    Raises InputError as `read_trace` does.
    """
    shape = (read_outline(folder).run.vocabulary,)
    fitting = (each for each in saved_tensors(folder) if each.name == "logits" and each.shape == shape)
    return KeptLogits(folder, {each.node: each for each in fitting if each.node is not None})


class KeptLogits(Mapping[int, "Logits"]):
    """Logits [V], float32, by node: each is read from its file when it is looked up, and checked.

    Looking up raises InputError where the file is missing, damaged or not in the run folder.
    """

    def __init__(self, folder: Path, entries: dict[int, SavedTensor]) -> None:
        self._folder, self._entries = folder, entries

    def __getitem__(self, node: int) -> "Logits":
        return _read(self._folder, self._entries[node])

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read(folder: Path, entry: SavedTensor) -> "Logits":
    from safetensors import SafetensorError, safe_open

    path = folder / entry.file
    try:
        # Checked first: a link may lead anywhere, and reading a pipe would wait for ever.
        if not (path.resolve().is_relative_to(folder.resolve()) and path.is_file()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with safe_open(path, "numpy") as block:
            inside: Any = block.get_slice(entry.name)
            if (inside.get_dtype(), inside.get_shape()) != ("F32", list(entry.shape)):
                raise SafetensorError(f"{entry.name} is not float32 {list(entry.shape)}")
            logits: Logits = block.get_tensor(entry.name)
            return logits
    except (OSError, RuntimeError, SafetensorError) as fault:  # RuntimeError: links in a circle
        # What safetensors says may quote from the file: nothing of it may act on a terminal.
        reason = getattr(fault, "strerror", None) or ascii(str(fault))[1:-1]
        raise InputError("trace.block", path=folder, file=entry.file, reason=reason) from fault
