"""What goes through the model's own door: positions, counted, and the cache they were appended to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache


@dataclass(slots=True)
class Passes:
    """Forward passes that came to their end: `token_forwards` is positions times rows, over all of them."""

    token_forwards: int = 0
    cache: KVCache | None = None  # of the last pass


@contextmanager
def counted(model: CausalLM) -> Iterator[Passes]:
    """Count the forward passes made inside. A hook on the whole model: nothing in the pass changes."""
    passes = Passes()

    def count(_: Any, args: tuple[Any, ...], named: dict[str, Any], __: Tensor) -> None:
        given = (*args, *named.values())  # the ids come first
        passes.token_forwards += given[0].numel()
        passes.cache = next((value for value in given if isinstance(value, KVCache)), None)

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
