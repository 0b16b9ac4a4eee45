"""Matrices in 8 or 4 bits on an accelerator, held and multiplied by bitsandbytes (the extra `quant`).

Our own kernels are for the processor. int8 is LLM.int8() (https://arxiv.org/abs/2208.07339): one scale for each
row of weights, activations in 8 bits row by row, those of magnitude 6 and more apart in 16. nf4 is QLoRA's
(https://arxiv.org/abs/2305.14314): blocks of 64, activations as they come. Embedding and head stay dense.
"""

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from decodescope.errors import InputError

KINDS = ("int8", "nf4")
_BLOCK = 64
_OUTLIER = 6.0


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [N, K] as bitsandbytes holds it; `format` is int8 or nf4.

    `codes` are int8 [N, K], or uint8 [N, K/2] with two levels each; `scales` float32 [N], or [N, K/64]; `state` is
    what bitsandbytes wants to see beside the codes.
    """

    format: str
    codes: Tensor
    scales: Float[Tensor, "N ..."]
    state: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows N and columns K."""
        rows, codes = self.codes.shape
        return rows, codes * (2 if self.format == "nf4" else 1)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def product(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        """x W^T in the dtype of x."""
        if self.format == "nf4":
            y: Tensor = _library().matmul_4bit(x, self.codes, quant_state=self.state)
        else:
            y = _library().matmul(x.half(), self.codes, state=self.state, threshold=_OUTLIER)
        return y.to(x.dtype)

    def rows(self, start: int, stop: int) -> Float[Tensor, "rows K"]:
        """Neighbouring rows in float32."""
        codes, scales = self.codes[start:stop], self.scales[start:stop]
        if self.format == "int8":
            return codes.float() * (scales / 127)[:, None]
        state = _nf4_state(scales, len(codes), self.shape[1])
        values: Tensor = _library().functional.dequantize_4bit(codes, state)
        return values


def quantized(matrix: Float[Tensor, "N K"], kind: str) -> Quantized | Tensor:
    """A dense matrix held by bitsandbytes where it lies; as it is where its rows are no whole blocks."""
    rows, columns = matrix.shape
    if kind == "nf4" and columns % _BLOCK:
        return matrix
    functional = _library().functional
    if kind == "nf4":
        codes, found = functional.quantize_4bit(matrix, blocksize=_BLOCK, quant_type="nf4")
        scales = found.absmax.view(rows, -1)
        return Quantized(kind, codes.view(rows, -1), scales, _nf4_state(scales, rows, columns))
    codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
    state = _library().MatmulLtState()
    state.CB, state.SCB = codes, scales
    state.has_fp16_weights = state.is_training = False
    return Quantized(kind, codes, scales, state)


def require(kind: str, device: torch.device) -> None:
    """Raise InputError where matrices cannot be held like this on this device."""
    if kind not in KINDS:
        raise InputError("quantize.device", kind=kind, device=device, known=", ".join(KINDS))
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("quantize.needs_bitsandbytes", kind=kind, device=device)


def _nf4_state(scales: Tensor, rows: int, columns: int) -> Any:
    functional = _library().functional
    return functional.QuantState(
        absmax=scales.reshape(-1),
        shape=torch.Size((rows, columns)),
        code=functional.get_4bit_type("nf4", device=scales.device),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=torch.float32,
    )


@cache
def _library() -> Any:
    # It warns that it could fetch a kernel of its own from the hub, which nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes
