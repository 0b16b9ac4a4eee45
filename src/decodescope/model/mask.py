"""Who may look at whom: causal order, left padding, sliding windows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decodescope.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Mask:
    """`visible` [B or 1, 1, T, S]: True where a query may look. None and not `is_causal`: all is visible.

    `is_narrow` where a sliding window hides some of it.
    """

    visible: Tensor | None = None
    is_causal: bool = False
    is_narrow: bool = False

    def of_row(self, row: int, positions: int) -> "Mask":
        """What the newest token of one row may see of its own `positions`, without the padding before them."""
        if self.visible is None or not self.is_narrow:
            return Mask()
        return Mask(self.visible[row : row + 1, :, :, -positions:], is_narrow=True)


def build_masks(
    config: ModelConfig, T: int, start: int, padding: Tensor | None, device: torch.device
) -> list[Mask]:
    """One mask per layer for T new positions behind `start` cached ones; layers of one kind share it.

    The fused kernel is fastest with no tensor at all, so one is built only where order alone does not say it.
    """
    made: dict[int | None, Mask] = {}
    for layer in range(config.num_hidden_layers):
        window = config.window(layer)
        if window not in made:
            made[window] = _mask(T, start, window, padding, device)
    return [made[config.window(layer)] for layer in range(config.num_hidden_layers)]


def _mask(T: int, start: int, window: int | None, padding: Tensor | None, device: torch.device) -> Mask:
    S = start + T
    narrow = window is not None and window < S
    if padding is None and not narrow and (T == 1 or start == 0):
        return Mask(is_causal=T > 1)
    queries = torch.arange(start, S, device=device)[:, None]  # T 1
    keys = torch.arange(S, device=device)[None, :]  # 1 S
    visible = keys <= queries  # T S
    if window is not None:
        visible = visible & (keys > queries - window)
    visible = visible[None, None]  # 1 1 T S
    if padding is not None:
        # A padding column sees itself: a row without any key would turn into NaN.
        visible = visible & ((keys >= padding[:, None, None, None]) | (keys == queries))
    return Mask(visible, is_narrow=narrow)
