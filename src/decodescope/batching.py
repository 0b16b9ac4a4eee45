"""Continuous batching: sequences that come and go share each pass over the weights, and nothing else."""

from collections.abc import Sequence

import torch

from decodescope.generate import Decoding
from decodescope.model.ragged import RaggedCache


def forward_together(decodings: Sequence[Decoding]) -> None:
    """`Decoding.forward` for single sequences that have one unseen token each, in one pass.

    Each attends to its own cache, as it would alone. Raises ValueError where one has more to read.
    """
    for each in decodings:
        first, end = each.next_pass()
        if end - first != 1:
            raise ValueError(f"{end - first} unseen tokens where one was to be")
    cache, device = RaggedCache([each.cache for each in decodings]), decodings[0].model.device
    ids = torch.tensor([[each.last_id] for each in decodings], device=device)  # B 1
    logits = decodings[0].compute(ids, cache, cache.padding(device))  # B V
    for row, each in enumerate(decodings):
        each.take(logits[row : row + 1])
