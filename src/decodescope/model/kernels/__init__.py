"""Matrix products that read a weight as it is stored; compiled on first use, portable where they cannot be."""

from decodescope.model.kernels.arena import Arena, keep_freed_blocks
from decodescope.model.kernels.attention import attends, cached_attention, cached_attention_of_rows
from decodescope.model.kernels.build import is_built
from decodescope.model.kernels.compiled import Report, available
from decodescope.model.kernels.packed import Packed, row_bytes
from decodescope.model.kernels.products import product, products, read_all, reads, unpack_rows
from decodescope.model.kernels.threads import helpers_alone

__all__ = [
    "Arena",
    "Packed",
    "Report",
    "attends",
    "available",
    "cached_attention",
    "cached_attention_of_rows",
    "helpers_alone",
    "is_built",
    "keep_freed_blocks",
    "product",
    "products",
    "read_all",
    "reads",
    "row_bytes",
    "unpack_rows",
]
