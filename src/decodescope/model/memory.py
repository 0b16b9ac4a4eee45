"""Running out of memory, recognised by one rule, and what a model holds."""

import torch

from decodescope.model.decoder import CausalLM

_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator said no; torch's CPU allocator says so in a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)


def held_bytes(model: CausalLM) -> int:
    """Bytes of all weights; a tied head counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
