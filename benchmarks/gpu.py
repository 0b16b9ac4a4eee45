"""Everything to be checked and timed on a GPU, in one go of under ten minutes; tables, and --json for the figures.

    python benchmarks/gpu.py                                     # the starter model
    python benchmarks/gpu.py -m starter-small --device cpu --quick   # the script itself, on any machine

Checks: every precision against float32 on the processor (KL per token), forks, cache, batches, recording, lens,
cache formats, flash attention; with several GPUs the layers spread over them. Times are those of `decodescope
bench` with transformers in turn, the memory each precision takes, and what a decoding step could gain: one block
compiled, and a whole step replayed as a CUDA graph. Ends with 1 where a check fails, with 2 where there is no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy import caches, measured, passages
from torch.nn.attention import SDPBackend, sdpa_kernel

from decodescope import Session
from decodescope.errors import DecodescopeError
from decodescope.experiments.bench.plan import DEFAULT, QUICK, Plan
from decodescope.experiments.bench.records import BenchReport
from decodescope.experiments.bench.study import open_bench
from decodescope.experiments.forks import Forking, ForkStudy
from decodescope.experiments.lens import LensPlan, study_lens
from decodescope.experiments.peers.known import parse_peers
from decodescope.model.decoder import CausalLM
from decodescope.model.kv_cache import KVCache
from decodescope.model.memory import held_bytes
from decodescope.model.placement import devices_of
from decodescope.observe.clock import peak_rss_bytes, wait_for
from decodescope.options import RunOptions

# Most of the mean KL to float32 on the processor, nats.
KL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 3e-2, "int8": 0.1, "nf4": 1.0}
CACHE_KL = {"float32 cache": 1e-2, "float16 cache": 1e-2, "int8 cache": 3e-2, "float8 cache": 0.1}
PROMPT = "List the planets of the solar system, one a line, each with one fact about it."
MEASURED = replace(
    DEFAULT,
    axes=("context", "batch", "recording", "prefill", "format", "against"),
    contexts=(32, 1024, 8192),
    formats=("bfloat16", "float16", "float32"),
    peers=parse_peers("transformers"),
    rounds=3,
    axis_s=30,
)
TRIED = replace(
    QUICK, axes=("context", "prefill"), contexts=(32,), prefills=(32,), new_tokens=4, rounds=1, measure_s=0.05
)


@dataclass(frozen=True, slots=True)
class Check:
    """`passed` None: could not be checked here, for the reason in `figure`."""

    name: str
    passed: bool | None
    figure: str


@dataclass(frozen=True, slots=True)
class Bed:
    """What is checked where: the reference on the processor, the texts, the sizes."""

    reference: Session
    device: str
    texts: list[list[int]]
    new_tokens: int
    context: int  # of the steps that are timed

    def opened(self, **loading: Any) -> Session:
        """The same model on the device."""
        return Session.open(str(self.reference.files.path), **{"device": self.device, **loading})


Checks = Iterator[Check]


def precisions(bed: Bed) -> Checks:
    """Every precision against float32 on the processor, whole and token by token, and the memory it takes."""
    for name, bound in KL.items():
        _forget_peak(bed.device)
        loading = {"dtype": name} if "float" in name else {"quantize": name}
        try:
            model = bed.opened(**loading).model
        except DecodescopeError as fault:
            yield Check(name, None, str(fault))
            continue
        for row in measured(bed.reference.model, model, name, bed.texts):
            figure = f"KL {row.kl_mean_nats:.1e} (at most {bound:.0e}), same first choice {row.top1_agreement:.3f}"
            yield Check(f"{name}, {row.read}", row.kl_mean_nats <= bound, figure)
        yield Check(f"{name}, memory", True, f"{held_bytes(model):,} bytes held, {_peak(bed.device):,} at most")


def behaviour(bed: Bed) -> Checks:
    """What must hold of runs, in float32: with and without cache, in a batch, observed, forked, and the lens."""
    session = bed.opened(dtype="float32")
    prompt, options = session.prompt(PROMPT), RunOptions(max_new_tokens=bed.new_tokens, ignore_eos=True)
    plain = session.run(prompt, options=options)
    there = bed.reference.run(prompt, options=options)
    yield Check("tokens are those of the processor", plain.token_ids == there.token_ids, repr(plain.text[:60]))
    uncached = session.run(prompt, options=replace(options, use_cache=False))
    yield Check("no cache, same tokens", uncached.token_ids == plain.token_ids, f"{bed.new_tokens} tokens")
    live = session.start([prompt, session.prompt("no"), prompt], options)
    list(live.steps())
    rows = [trace.token_ids for trace in live.traces]
    yield Check("a padded batch, same tokens", rows[0] == rows[2] == plain.token_ids, f"{len(rows)} rows")
    with session.observe(summarise=["*"]) as recording:
        seen = session.run(prompt, options=options)
    same = seen.token_ids == plain.token_ids and recording.first_nonfinite is None
    yield Check("everything recorded, same tokens", same, f"{len(recording.summaries)} values summed up")
    error = recording.reconstruction_error
    yield Check("attention recomputed", error is not None and error < 1e-3, f"largest error {error}")
    study = ForkStudy(session, plain, Forking(bed.new_tokens // 2, branches=3, verify=True))
    study.run()
    found = [each.verification for each in study.report().branches]
    agrees = all(each is not None and each.agrees for each in found)
    yield Check("forks are runs of their own", agrees, f"{len(found)} branches")
    error = study_lens(session, prompt, LensPlan(steps=1)).last_layer_error
    yield Check("the lens ends at the run's logits", error < 1e-2, f"largest difference {error:.1e}")


def formats_of_the_cache(bed: Bed) -> Checks:
    """Caches in every format beside one in bfloat16."""
    for row in caches(bed.opened(dtype="bfloat16").model, bed.texts):
        bound = CACHE_KL[row.name]
        yield Check(row.name, row.kl_mean_nats <= bound, f"KL {row.kl_mean_nats:.1e} (at most {bound:.0e})")


def flash(bed: Bed) -> Checks:
    """Whether torch's flash kernel takes our attention: nothing else is allowed to."""
    model = bed.opened(dtype="bfloat16").model
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            model(torch.tensor([bed.texts[0]], device=model.device))
    except RuntimeError as fault:
        yield Check("flash attention", False, str(fault).split("\n")[0][:120])
    else:
        yield Check("flash attention", True, "reads a prompt")


def several(bed: Bed) -> Checks:
    """Layers over all GPUs: the tokens of one."""
    count = torch.accelerator.device_count() if bed.device != "cpu" else 0
    if count < 2:
        yield Check("layers over several GPUs", None, f"{count} here")
        return
    options = RunOptions(max_new_tokens=bed.new_tokens, ignore_eos=True)
    one, spread = bed.opened(dtype="float32"), bed.opened(dtype="float32", device="auto")
    same = one.run(PROMPT, options=options).token_ids == spread.run(PROMPT, options=options).token_ids
    yield Check("layers over several GPUs", same, ", ".join(map(str, devices_of(spread.model))))


@torch.inference_mode()
def steps(bed: Bed) -> Checks:
    """A decoding step in bfloat16, and what it could gain: informative, it passes whatever comes of it."""
    model = bed.opened(dtype="bfloat16").model
    ids, cache = torch.zeros(1, 1, dtype=torch.long, device=model.device), KVCache(model.config.num_hidden_layers)
    model(torch.zeros(1, bed.context, dtype=torch.long, device=model.device), cache)

    def step() -> None:
        model(ids, cache)
        cache.truncate(bed.context)

    eager = _seconds(step, model.device)
    yield Check(f"step behind {bed.context}", True, f"{eager * 1e3:.2f} ms")
    block, given = model.model.layers[0], (*_block_inputs(model), cache)
    yield Check("one block", True, f"{_seconds(lambda: block(*given), model.device) * 1e3:.3f} ms")
    yield _tried("one block compiled", lambda: partial(torch.compile(block, dynamic=True), *given), model.device)
    if model.device.type == "cuda":
        yield _tried("step as a CUDA graph", lambda: _graph(step).replay, model.device)


def _graph(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as one launch. It computes the same position again and again: what is saved is only the launching."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _tried(name: str, make: Callable[[], Callable[..., Any]], device: torch.device) -> Check:
    """Time what a compiler makes; what it runs into is a finding, no fault of ours."""
    try:
        return Check(name, True, f"{_seconds(make(), device) * 1e3:.3f} ms")
    except Exception as fault:
        return Check(name, None, f"{type(fault).__name__}: {str(fault).splitlines()[0][:100]}")


def _block_inputs(model: CausalLM) -> tuple[Any, ...]:
    """What the first block is given for one new token: residual stream, rotary table, mask."""
    caught: list[tuple[Any, ...]] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, given: caught.append(given[:3]))
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    hook.remove()
    return caught[0]


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median of some runs, the device waited for; the first ones warm up."""
    times = []
    for _ in range(13):
        started = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return median(times[3:])


def _forget_peak(device: str) -> None:
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def _peak(device: str) -> int:
    return peak_rss_bytes() if device == "cpu" else int(torch.accelerator.max_memory_allocated())


def timed(bed: Bed, plan: Plan) -> BenchReport | None:
    """What `decodescope bench` measures on the device."""
    bench = open_bench(str(bed.reference.files.path), plan, {"device": bed.device, "dtype": "bfloat16"}, print)
    for at in bench.steps():
        print(f"\r{at.part} {at.done}/{at.total}    ", end="", file=sys.stderr, flush=True)
    return bench.report()


def table(report: BenchReport) -> Iterator[str]:
    """A line for each rate."""
    for decode in report.decode:
        at = f"behind {decode.context}, batch {decode.batch}{', recorded' if decode.recording else ''}"
        yield f"| {decode.engine} {decode.format} | decode {at} | {decode.tokens_per_s:,.1f} tokens/s |"
    for prefill in report.prefill:
        what = f"prefill of {prefill.tokens}"
        yield f"| {prefill.engine} {prefill.format} | {what} | {prefill.tokens_per_s:,.1f} tokens/s |"
    for missing in report.missing:
        yield f"| {missing.what} | {missing.reason} | {missing.detail} |"


STUDIES = (precisions, behaviour, formats_of_the_cache, flash, several, steps)


def checked(bed: Bed) -> Checks:
    """Everything; a study that breaks off has failed, and the others go on."""
    for study in STUDIES:
        try:
            yield from study(bed)
        except Exception as fault:
            yield Check(study.__name__, False, f"{type(fault).__name__}: {str(fault)[:200]}")


def main() -> int:
    """Check, time, print."""
    given = _arguments()
    kind = torch.accelerator.current_accelerator(check_available=True)
    if given.device is None and kind is None:
        print("No GPU here: run this where there is one, or try it with --device cpu --quick.", file=sys.stderr)
        return 2
    started, reference = time.perf_counter(), Session.open(given.model, dtype="float32")
    texts = passages(reference, 2 if given.quick else None, 8 if given.quick else 48)
    bed = Bed(reference, given.device or f"{kind}:0", texts, *((6, 64) if given.quick else (32, 1024)))
    found = []
    for check in checked(bed):
        mark = {True: "ok", False: "FAILED", None: "left out"}[check.passed]
        print(f"| {check.name} | {mark} | {check.figure} |", flush=True)
        found.append(check)
    report = timed(bed, TRIED if given.quick else MEASURED)
    print("", *(table(report) if report else ()), f"{time.perf_counter() - started:.0f} s", sep="\n")
    if given.json:
        document = {
            "device": bed.device,
            "torch": str(torch.__version__),
            "checks": list(map(asdict, found)),
            "bench": report and asdict(report),
        }
        given.json.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
    return int(any(check.passed is False for check in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--device", help="default: the GPU")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
