"""Products y = x W^T per storage format, against the read bandwidth of the same minute, and all of one token's.

Every line is timed in turn with a plain read of the same bytes by the same threads, so that a drifting machine
moves both; medians of pairs. With `--model` (a GGUF file) the products of one token, all layers and the output
head, run on the file's own blocks. `--against-torch` adds torch's product on the dense weight where there is one.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from decodescope.formats.gguf import read_header
from decodescope.model.kernels import Arena, Packed, available, product, read_all, row_bytes
from decodescope.model.kernels.packed import FORMATS
from decodescope.models import find_model

DENSE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
Product = Callable[[], object]


def seconds(run: Product) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def random_weight(stored: str, columns: int, size_bytes: int) -> Packed | Tensor:
    """About that many bytes of a format, in huge pages; every float16 in a block is small."""
    if stored in DENSE:
        rows = size_bytes // columns // DENSE[stored].itemsize
        return Arena().take((rows, columns), DENSE[stored]).normal_()
    width = row_bytes(stored, columns)
    if width is None:
        raise SystemExit(f"rows of {columns} weights are no whole {stored} blocks")
    return Packed(stored, Arena().take((size_bytes // width, width), torch.uint8).random_(0, 0x30))


def paired(run: Product, read: Product, pairs: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of read / run pair by pair."""
    run(), read()
    both = [(seconds(run), seconds(read)) for _ in range(pairs)]
    return (
        statistics.median(a for a, _ in both),
        statistics.median(b for _, b in both),
        statistics.median(b / a for a, b in both),
    )


def report(name: str, size_bytes: int, timed: tuple[float, float, float]) -> None:
    """One line: GB/s of the product, of reading, and the share."""
    run, read, share = timed
    rates = f"{size_bytes / run / 1e9:6.1f} GB/s   read {size_bytes / read / 1e9:6.1f} GB/s   share {share:5.2f}"
    print(f"{name:24} {run * 1e3:8.2f} ms   {rates}", flush=True)


def formats(given: argparse.Namespace) -> None:
    """Every format, and rows of activations."""
    for stored in given.formats:
        weight = random_weight(stored, given.columns, given.megabytes << 20)
        raw = _bytes(weight)
        for rows in given.rows:
            x = torch.randn(rows, given.columns)
            read = partial(read_all, raw)
            report(f"{stored} rows={rows}", raw.nbytes, paired(partial(product, x, weight), read, given.pairs))
            if given.against_torch and isinstance(weight, Tensor):
                torchs = partial(functional.linear, x.to(weight.dtype), weight)
                report("  torch", raw.nbytes, paired(torchs, read, given.pairs))


def _bytes(weight: Packed | Tensor) -> Tensor:
    return weight.blocks if isinstance(weight, Packed) else weight.view(torch.uint8)


def stored_weights(path: Path) -> Iterator[Packed | Tensor]:
    """The matrices of a GGUF file in its order; the embedding only where it is the output head too."""
    tensors, arena = read_header(path).tensors, Arena()
    with path.open("rb") as file:
        for name, info in tensors.items():
            if len(info.shape) == 2 and (name != "token_embd.weight" or "output.weight" not in tensors):
                raw = arena.take((info.shape[0], info.bytes // info.shape[0]), torch.uint8)
                file.seek(info.offset)
                file.readinto(raw.numpy().data)
                yield (
                    Packed(info.block_type, raw)
                    if info.block_type in FORMATS
                    else raw.view(DENSE[info.block_type])
                )


def token(model: str, pairs: int) -> None:
    """All products of one token."""
    weights = list(stored_weights(find_model(model).path))
    inputs = [torch.randn(1, weight.shape[1]) for weight in weights]

    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            product(x, weight)

    def read() -> None:
        for weight in weights:
            read_all(_bytes(weight))

    report(f"token of {model}", sum(_bytes(weight).nbytes for weight in weights), paired(run, read, pairs))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", help="a GGUF model: all products of one token")
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, *DENSE])
    parser.add_argument("--rows", nargs="*", type=int, default=[1])
    parser.add_argument("--columns", type=int, default=4864)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against-torch", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{available()}, {given.threads} threads")
    formats(given)
    if given.model:
        token(given.model, given.pairs)


if __name__ == "__main__":
    main()
