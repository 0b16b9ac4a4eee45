"""Unpacking blocks into float32 with torch: GGUF's exactly as ggml defines them, and NF4.

Layouts: ggml-common.h of https://github.com/ggml-org/ggml. The common types are written out here, because
the numpy code of the `gguf` package needs seconds for half a gigabyte; the rare ones use that package.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decodescope.formats.gguf import BLOCK_TYPES

# Block type -> values and bytes in a block.
BLOCK_SIZES = {name: (values, width) for name, values, width in BLOCK_TYPES.values()} | {"NF4": (64, 34)}

# Quantiles of the normal distribution, zero among them: QLoRA (https://arxiv.org/abs/2305.14314), appendix E.
NF4_LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip

_CHUNK_VALUES = 1 << 18  # a chunk and its temporaries stay near the processor's cache


def unpack_into(out: Tensor, raw: Tensor, block_type: str) -> None:
    """Write the values of `raw` (uint8, whole blocks) into the contiguous `out` of any floating dtype."""
    values, width = BLOCK_SIZES[block_type]
    blocks, flat = raw.view(-1, width), out.view(-1)
    step = max(1, _CHUNK_VALUES // values)
    unpack = _UNPACK.get(block_type) or _with_gguf_package(block_type)
    for at in range(0, blocks.shape[0], step):
        chunk = unpack(blocks[at : at + step])
        flat[at * values : at * values + chunk.numel()] = chunk.reshape(-1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves first, then high halves: uint8 [..., m] -> [..., 2 m]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


# Byte -> its eight bits, lowest first, each at bit 4 of a byte of its own: one look-up for eight values.
_BITS = (((torch.arange(256)[:, None] >> torch.arange(8)) & 1) << 4).to(torch.uint8).view(torch.int64).view(-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """The 32 single bits of 4 bytes [n, 4], each moved to bit 4: [n, 32]."""
    return _BITS[packed.int()].view(torch.uint8)


def _q4_0(b: Tensor) -> Tensor:
    return _nibbles(b[:, 2:]).float().sub_(8).mul_(_half(b, 0))


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[:, 4:]).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float().sub_(16).mul_(_half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float().mul_(_half(b, 0))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes [n, 12], each as float32 [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _scaled_with_minimum(b: Tensor, quants: Tensor) -> Tensor:
    """Q4_K and Q5_K: eight groups of 32 [n, 8, 32], each with its scale and minimum."""
    scales, minima = _six_bit_scales(b[:, 4:16])
    return (_half(b, 0) * scales)[:, :, None] * quants.float() - (_half(b, 2) * minima)[:, :, None]


def _q4_k(b: Tensor) -> Tensor:
    return _scaled_with_minimum(b, _nibbles(b[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((b[:, 16:48][:, None, :] >> shifts) & 1) << 4  # n 8 32
    return _scaled_with_minimum(b, _nibbles(b[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | high)


def _q6_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((b[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32) << 4
    scales = b[:, 192:208].contiguous().view(torch.int8).float() * _half(b, 208)  # n 16
    return scales[:, :, None] * ((low | high).float() - 32).view(-1, 16, 16)


def _nf4(b: Tensor) -> Tensor:
    """Largest magnitude, then the numbers of the levels."""
    return NF4_LEVELS[_nibbles(b[:, 2:]).int()].mul_(_half(b, 0))


def _f32(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float32)


def _f16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def _bf16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.bfloat16).float()


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "NF4": _nf4,
}  # fmt: skip


def _with_gguf_package(block_type: str) -> Callable[[Tensor], Tensor]:
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[block_type]

    def unpack(blocks: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # what is not finite is named by the loader
            return torch.from_numpy(quants.dequantize(blocks.numpy(), kind))

    return unpack
