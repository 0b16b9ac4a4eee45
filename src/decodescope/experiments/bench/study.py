"""The study: axis by axis, round by round, everything that is compared in turn; whatever ends it, a report."""

import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decodescope.errors import ResourceError
from decodescope.experiments.bench.figures import expected_bytes
from decodescope.experiments.bench.loading import Loads
from decodescope.experiments.bench.machine import Limits
from decodescope.experiments.bench.messages import (
    OURS,
    STORED,
    CacheTask,
    CacheTimes,
    Contender,
    DecodeTask,
    Setup,
)
from decodescope.experiments.bench.plan import LONG, SHORT, Cases, Plan
from decodescope.experiments.bench.process import EngineFault, Pool
from decodescope.experiments.bench.records import BenchReport, DecodeRow, EngineRow, Missing, PrefillRow
from decodescope.experiments.bench.rounds import Rounds
from decodescope.experiments.bench.series import Series, decode_row, prefill_row
from decodescope.experiments.bench.subject import Subject, find_subject
from decodescope.experiments.cache_curve import compare
from decodescope.experiments.peers.known import Peer
from decodescope.loading import Loading
from decodescope.model.cost import count_parameters
from decodescope.model.devices import devices_called
from decodescope.model.precision import QUANTIZE
from decodescope.models import Report

_LOOKS = 3  # rounds of the machine alone
_CACHE_TOKENS = 8  # new ones, with and without the cache


@dataclass(frozen=True, slots=True)
class Done:
    """Where the study stands: `part` is an axis, or `machine`."""

    part: str
    done: int
    total: int


class Bench:
    """Iterate `steps()`; `report()` tells what was measured so far."""

    def __init__(self, subject: Subject, plan: Plan, loading: Loading) -> None:
        """`loading` says what our own model is held in, and all engines' device and threads."""
        self._subject, self._loading = subject, loading
        self._threads, device = loading.threads or torch.get_num_threads(), devices_called(loading.device)[-1]
        self._device = device
        self._base = Contender(OURS, _format(loading))
        self._left_out = {peer: reason for peer in plan.peers if (reason := _unusable(peer, subject))}
        self._plan = replace(plan, peers=tuple(peer for peer in plan.peers if peer not in self._left_out))
        self._pool = Pool(self._setup, self._expected)
        self._limits = Limits(device, self._threads, self._expected(self._base))
        most = subject.config.max_position_embeddings
        self._cases = Cases(self._plan, self._base, subject.ids, most, self._limits.compiled)
        self._rounds: dict[str, Rounds] = {}
        self._loads = Loads(subject.files, self._setup(self._base))
        self._cache = CacheTimes((), ())
        self._started, self._complete = time.perf_counter(), False

    def steps(self) -> Generator[Done]:
        """Measure everything that was planned. Raises InputError or ResourceError where our own engine fails; what
        another one fails in is left out and told.
        """
        sizes = {axis: self._size(axis) for axis in self._plan.axes}
        done, total = 0, _LOOKS + sum(sizes.values())
        try:
            for _ in range(_LOOKS):
                yield Done("machine", done, total)
                self._limits.look()
                done += 1
            for axis, size in sizes.items():
                for number, _ in enumerate(self._measure(axis) if size else ()):
                    yield Done(axis, done + number, total)
                done += size
                self._pool.remember()
            self._complete = True
        finally:
            self._pool.close()

    def report(self) -> BenchReport | None:
        """Everything so far; None before the machine is known."""
        machine = self._limits.machine()
        if machine is None:
            return None
        config = self._subject.config
        return BenchReport(
            model=self._subject.name,
            architecture=config.architecture,
            parameters=count_parameters(config).total,
            stored_bytes=self._subject.stored_bytes,
            machine=machine,
            engines=self._engines(),
            engines_took_turns=self._pool.took_turns,
            decode=self._decode_rows(),
            prefill=self._prefill_rows(),
            cached=self._cache.cached,
            uncached=self._cache.uncached,
            compared=tuple(map(compare, self._cache.cached, self._cache.uncached)),
            load=self._loads.rows(),
            missing=self._missing(),
            seconds=time.perf_counter() - self._started,
            complete=self._complete,
        )

    def _size(self, axis: str) -> int:
        """How many steps an axis has at most."""
        if axis == "load":
            return 2 * self._plan.load_rounds if self._subject.files else 0
        return 1 if axis == "cache" else self._plan.rounds * len(self._cases.of(axis))

    def _measure(self, axis: str) -> Iterator[None]:
        """One axis. Yields before and between the measurements."""
        yield
        try:
            if axis == "load":
                yield from self._loads.run(self._plan.load_rounds)
            elif axis == "cache":
                self._compare()
            else:
                self._rounds[axis] = Rounds(self._cases.of(axis), self._plan, self._pool, self._limits)
                yield from self._rounds[axis].run()
        except EngineFault as fault:
            raise ResourceError("bench.engine_ended", reason=fault) from None

    def _compare(self) -> None:
        prompt = self._cases.prompt(SHORT)
        room = self._subject.config.max_position_embeddings - _CACHE_TOKENS
        lengths = tuple(dict.fromkeys(min(length, room) for length in self._plan.cache_lengths))
        self._cache = self._pool.get(self._base).cache(CacheTask(prompt, lengths, _CACHE_TOKENS))

    def _setup(self, contender: Contender) -> Setup:
        return Setup(
            engine=contender.engine,
            format=contender.format,
            path=str(self._subject.path),
            random=None if self._subject.random is None else str(self._subject.random),
            device=str(self._device),
            threads=self._threads,
            most_tokens=LONG + SHORT + self._plan.new_tokens,
            loading=asdict(replace(self._held_as(contender.format), random_weights=None)),  # see `random`
        )

    def _held_as(self, wanted: str) -> Loading:
        """How our own model is to be loaded for a format."""
        if wanted == self._base.format:
            return replace(self._loading, threads=self._threads)
        quantized = wanted in QUANTIZE
        dtype = None if quantized or wanted == STORED else wanted
        return replace(self._loading, threads=self._threads, dtype=dtype, quantize=wanted if quantized else "none")

    def _expected(self, contender: Contender) -> int:
        return expected_bytes(contender, self._subject.config, sum(self._subject.stored_bytes.values()))

    def _all(self, axis: str, decoding: bool) -> list[Series]:
        """The series of an axis that have come to something."""
        known = self._rounds[axis].series
        return [each for each in known if each.timed and isinstance(each.case.task, DecodeTask) == decoding]

    def _decode_rows(self) -> tuple[DecodeRow, ...]:
        opened = self._pool.opened
        found = [self._all(axis, decoding=True) for axis in self._rounds]
        return tuple(decode_row(each, some[0], opened[each.case.contender]) for some in found for each in some)

    def _prefill_rows(self) -> tuple[PrefillRow, ...]:
        opened, config = self._pool.opened, self._subject.config
        found = [self._all(axis, decoding=False) for axis in self._rounds]
        return tuple(
            prefill_row(each, some[0], opened[each.case.contender], config) for some in found for each in some
        )

    def _engines(self) -> tuple[EngineRow, ...]:
        return tuple(self._engine(contender) for contender in self._pool.opened)

    def _engine(self, contender: Contender) -> EngineRow:
        opened, ready = self._pool.opened[contender], self._pool.ready[contender]
        most = self._pool.peaks.get(contender)
        return EngineRow(
            engine=contender.engine,
            format=contender.format,
            version=opened.version,
            build=opened.build,
            activations=opened.activations,
            kernels=opened.kernels,
            weights_bytes=opened.weights_bytes,
            ready_rss_bytes=ready.rss_bytes,
            loading_peak_rss_bytes=ready.peak_rss_bytes,
            peak_rss_bytes=most.peak_rss_bytes if most else None,
        )

    def _missing(self) -> tuple[Missing, ...]:
        """What was left out, and why."""
        told = [Missing(peer.name, reason, peer.packages) for peer, reason in self._left_out.items()]
        if self._loads.no_cold:
            told.append(Missing("load", "no_cold", ""))
        for rounds in self._rounds.values():
            told += [
                Missing(each.engine, "failed", f"{each.format}: {why}") for each, why in rounds.failed.items()
            ]
        return tuple(told)


def open_bench(model: str, plan: Plan, loading: dict[str, Any], report: Report) -> Bench:
    """A bench of the model that `model` names; `loading` as in `Session.open`. Raises InputError."""
    how = Loading(**loading)
    return Bench(find_subject(model, how, report), plan, how)


def _format(loading: Loading) -> str:
    return loading.quantize if loading.quantize != "none" else loading.dtype or STORED


def _unusable(peer: Peer, subject: Subject) -> str | None:
    """Why an engine cannot take part, if so."""
    if not peer.installed:
        return "not_installed"
    return "only_gguf" if peer.only_gguf and not subject.is_gguf else None
