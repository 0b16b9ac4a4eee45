"""The matrix product behind one name: y = x W^T + b, whatever W is held as; and the look-up of embeddings.

W is dense in any floating dtype, in blocks (`kernels.Packed`), or on an accelerator held by bitsandbytes.
Activations keep the dtype they come in. Few rows of them against 16-bit numbers or blocks go through our kernels,
which read each weight once, as it is stored; everything else is torch's product, for blocks tile by tile.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from decodescope.model.bitsandbytes import Quantized
from decodescope.model.kernels import Packed, available, product, products, reads, unpack_rows
from decodescope.model.on_disk import OnDisk


class Matrix(nn.Module):
    """Something that holds a matrix [N, K] in `weight`, dense, packed or on disk; rows are `held[start:stop]`."""

    weight: nn.Parameter | Packed | OnDisk | Quantized

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=False)

    def hold(self, matrix: Tensor | Packed | OnDisk | Quantized) -> None:
        """Take this matrix in place of the one held."""
        del self.weight  # torch lets nothing but a parameter follow a parameter
        if not isinstance(matrix, Packed | OnDisk | Quantized | nn.Parameter):
            matrix = nn.Parameter(matrix, requires_grad=False)
        self.weight = matrix

    @property
    def in_memory(self) -> Tensor | Packed:
        """The matrix held; one left on disk is read for whoever asks."""
        weight = self.weight
        assert not isinstance(weight, Quantized)
        return weight.read() if isinstance(weight, OnDisk) else weight

    @property
    def stored_as(self) -> str:
        """Block format (Q4_K ...), dtype (bfloat16 ...), or what bitsandbytes calls it (int8, nf4)."""
        weight = self.weight
        if isinstance(weight, Packed | OnDisk | Quantized):
            return weight.format
        return str(weight.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows N and columns K."""
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def device(self) -> torch.device:
        """Where the matrix lies."""
        return self.weight.device

    def __getitem__(self, rows: slice) -> Float[Tensor, "rows K"]:
        """Neighbouring rows, dense; of a matrix in fewer bits in float32."""
        start, stop, _ = rows.indices(self.shape[0])
        if isinstance(self.weight, Quantized):
            return self.weight.rows(start, stop)
        matrix = self.in_memory
        return unpack_rows(matrix, start, stop, torch.float32) if isinstance(matrix, Packed) else matrix[rows]


class Linear(Matrix):
    """y = x W^T + b, in the dtype of x."""

    bias: nn.Parameter | None

    def __init__(self, columns: int, rows: int, bias: bool) -> None:
        super().__init__(rows, columns)
        self.register_parameter("bias", nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None)

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        if isinstance(self.weight, Quantized):
            return self._with_bias(self.weight.product(x))
        weight = self.in_memory
        ours = products(x, (weight,), (self.bias,))
        if ours is not None:
            return ours[0].to(x.dtype)
        if not isinstance(weight, Packed) and weight.dtype == x.dtype:
            return F.linear(x, weight, self.bias)
        if isinstance(weight, Packed) or weight.device.type == "cpu":
            return self._with_bias(product(x, weight)).to(x.dtype)
        return self._with_bias(F.linear(x.to(weight.dtype), weight).to(x.dtype))

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y.add_(self.bias)


def together(x: Float[Tensor, "... K"], *linears: Linear) -> Sequence[Float[Tensor, "... N"]]:
    """What each makes of the same x, bit by bit. Matrices that our kernels read are one piece of work: a small one
    leaves helpers little to do, and every call has its price.
    """
    ours = products(x, [linear.weight for linear in linears], [linear.bias for linear in linears])
    if ours is None:
        return [linear(x) for linear in linears]
    return ours if x.dtype == ours[0].dtype else [y.to(x.dtype) for y in ours]


def by_kernels(model: nn.Module) -> bool:
    """Whether few rows of activations meet none of torch's products: our kernels read every matrix."""
    known = all(reads(each.weight) for each in model.modules() if isinstance(each, Linear))
    return known and available().instructions is not None


class Embedding(Matrix):
    """One row for each id."""

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T K"]:
        weight = self.in_memory
        if not isinstance(weight, Packed):
            return F.embedding(ids, weight)
        picked = Packed(weight.format, weight.blocks[ids.reshape(-1)])
        return unpack_rows(picked, 0, ids.numel(), torch.float32).view(*ids.shape, -1)
