"""A model on several devices: what goes into a part is moved to where the part lies.

The forward pass knows nothing of it: ids go in and logits come out at `CausalLM.device`, and the residual stream,
rotary tables and masks are moved before a part sees them. The cache of a layer and what a tap is shown lie with
the layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from decodescope.model.decoder import CausalLM
from decodescope.model.mask import Mask


def devices_of(model: CausalLM) -> tuple[torch.device, ...]:
    """The devices that a model lies on, in the order of its parts."""
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


def connect(model: CausalLM) -> None:
    """Make a model whose parts lie on several devices run."""
    carrier = _Carrier()
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm):
        part.register_forward_pre_hook(carrier.bring)
    model.register_forward_hook(carrier.forget, always_call=True)


class _Carrier:
    """Moves what goes into a part. What all layers are given is moved once to each device."""

    def __init__(self) -> None:
        # By id and device: the thing itself, so that its id stays its own, and the moved one.
        self._moved: dict[tuple[int, torch.device], tuple[Any, Any]] = {}

    def bring(self, part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a part: its arguments, where it lies. The first is new every time."""
        device = next(part.parameters()).device
        return (given[0].to(device), *(self._shared(each, device) for each in given[1:]))

    def forget(self, *_: object) -> None:
        """After a pass, also a broken off one."""
        self._moved.clear()

    def _shared(self, thing: Any, device: torch.device) -> Any:
        if not isinstance(thing, Mask | tuple):
            return thing  # the cache and the tap
        key = id(thing), device
        if key not in self._moved:
            self._moved[key] = thing, _to(thing, device)
        return self._moved[key][1]


def _to(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, Mask):
        return Mask(None if thing.visible is None else thing.visible.to(device), thing.is_causal)
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in thing)
