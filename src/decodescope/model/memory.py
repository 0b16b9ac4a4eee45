"""Running out of memory, recognised by one rule, and what a model holds."""

import torch

from decodescope.model.bitsandbytes import Quantized
from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import Packed
from decodescope.model.linear import Matrix

_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator said no; torch's CPU allocator says so in a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)


def held_bytes(model: CausalLM) -> int:
    """Bytes of all weights in memory; a tied head counts once, what lies on disk as the room for two layers."""
    held = {id(m.weight): m.weight for m in model.modules() if isinstance(m, Matrix)}
    dense = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return dense + sum(weight.nbytes for weight in held.values() if isinstance(weight, Packed | Quantized))
