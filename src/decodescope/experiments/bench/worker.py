"""An engine in a process of its own: a request a line comes in, an answer a line goes out, until the input ends.

Run as a program. Whatever libraries print goes to standard error; SIGINT is the parent's business.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, Protocol

import psutil

from decodescope.errors import DecodescopeError
from decodescope.experiments.bench.messages import (
    LLAMACPP,
    OPENVINO,
    OURS,
    TRANSFORMERS,
    CacheTask,
    DecodeTask,
    Opened,
    PrefillTask,
    Resident,
    Setup,
    Timed,
    tuples,
)

_MODULES = {
    OURS: "decodescope.experiments.bench.ours",
    TRANSFORMERS: "decodescope.experiments.peers.with_transformers",
    LLAMACPP: "decodescope.experiments.peers.with_llamacpp",
    OPENVINO: "decodescope.experiments.peers.with_openvino",
}


class Engine(Protocol):
    """A model held open by some library. Each of the modules above has a class of this shape, named Engine."""

    opened: Opened

    def __init__(self, setup: Setup) -> None: ...

    def decode(self, task: DecodeTask) -> Timed:
        """Greedily, as the library's own users do."""
        ...

    def prefill(self, task: PrefillTask) -> Timed:
        """To the logits of the next token."""
        ...


class Desk:
    """Answers requests with the one engine that it has opened."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._known: dict[str, Callable[[dict[str, Any]], object]] = {
            "open": lambda request: self._open(Setup(**request)),
            "decode": lambda request: self._engine.decode(DecodeTask(**request)),
            "prefill": lambda request: self._engine.prefill(PrefillTask(**request)),
            "cache": lambda request: self._engine.cache(CacheTask(**request)),
            "memory": lambda request: _resident(),
        }

    def answer(self, line: str) -> dict[str, Any]:
        """`{"done": ...}`, or what went wrong: a fault of ours with its key, or a sentence of the library's."""
        request = tuples(json.loads(line))
        try:
            done: Any = self._known[request.pop("ask")](request)
        except DecodescopeError as fault:
            values = {name: str(value) for name, value in fault.values.items()}
            return {"fault": type(fault).__name__, "key": fault.key, "values": values}
        except (Exception, SystemExit) as fault:
            return {"failed": " ".join(f"{type(fault).__name__}: {fault}".split())[:300]}
        return {"done": asdict(done)}

    def _open(self, setup: Setup) -> Opened:
        engine = import_module(_MODULES[setup.engine]).Engine
        started = time.perf_counter()
        self._engine = engine(setup)
        opened: Opened = self._engine.opened
        return replace(opened, open_s=time.perf_counter() - started)


def _resident() -> Resident:
    from decodescope.observe.clock import peak_rss_bytes

    return Resident(psutil.Process().memory_info().rss, peak_rss_bytes())


def main() -> None:
    """Answer every line of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    desk = Desk()
    for line in sys.stdin:
        print(json.dumps(desk.answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
