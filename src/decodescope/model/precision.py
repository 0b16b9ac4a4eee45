"""What a model is held in: the dtype of its activations, and what becomes of the stored matrices."""

from dataclasses import dataclass

import torch

from decodescope.errors import InputError
from decodescope.model.bitsandbytes import require
from decodescope.model.kernels import available
from decodescope.model.weights import GGUFWeights, Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"  # whichever 16 bits are fastest here: see `fastest.py`
QUANTIZE = ("none", "int8", "int4", "nf4")


@dataclass(frozen=True, slots=True)
class Precision:
    """`activations` is also the dtype of norms and biases; `matrices` None: as they are stored.

    `quantize` other than "none": matrices are put into blocks while they are loaded, or `by_bitsandbytes` those of
    the layers into its forms.
    """

    activations: torch.dtype
    matrices: torch.dtype | None
    quantize: str = "none"
    by_bitsandbytes: bool = False

    @property
    def held_as(self) -> str | None:
        """What matrices are held in, where it is not the activations' dtype."""
        if self.quantize != "none":
            return self.quantize
        if self.matrices is None:
            return "packed"
        return None if self.matrices == self.activations else str(self.matrices).removeprefix("torch.")

    def of(self, shape: tuple[int, ...]) -> torch.dtype | None:
        """What a tensor of this shape is read as; None: as it is stored."""
        return self.matrices if len(shape) == 2 else self.activations


def choose_precision(weights: Weights, dtype: str | None, quantize: str, device: torch.device) -> Precision:
    """What options mean for a checkpoint, `dtype` being none of `auto`. Raises InputError for names not offered.

    float16 overflows at 65504, which activations of large models reach: they stay float32. Blocks stay packed only
    where compiled products read them; unpacking them for every token would be slower than holding them dense.
    """
    check_precision(dtype, quantize)
    if quantize != "none":
        activations = _activations(torch_dtype(dtype or "float32"))
        if device.type == "cpu":
            return Precision(activations, None, quantize)
        require(quantize, device)
        stored = weights.stored_dtype
        return Precision(activations, stored if stored.itemsize == 2 else torch.float16, quantize, True)
    if dtype is not None or not isinstance(weights, GGUFWeights):
        matrices = torch_dtype(dtype) if dtype else weights.stored_dtype
        return Precision(_activations(matrices), matrices)
    packed = device.type == "cpu" and available().instructions is not None
    return Precision(torch.float32, None if packed else torch.float32)


def _activations(matrices: torch.dtype) -> torch.dtype:
    return torch.float32 if matrices == torch.float16 else matrices


def check_precision(dtype: str | None, quantize: str) -> None:
    """Raise InputError for names that are not offered."""
    if dtype is not None and dtype != AUTO:
        torch_dtype(dtype)
    if quantize not in QUANTIZE:
        raise InputError("quantize.unknown", name=quantize, known=", ".join(QUANTIZE))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`. Raises InputError for one that is not offered."""
    if name not in DTYPES:
        raise InputError("dtype.unknown", name=name, known=", ".join((*DTYPES, AUTO)))
    return DTYPES[name]
