"""decodescope: watch a language model choose every token.

    from decodescope import Session
    trace = Session.open("starter").run("春天", max_new_tokens=8)

The public names load on first use, so that `decodescope --help` and `show` start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodescope.errors import DecodescopeError, InputError
    from decodescope.live import LiveRun
    from decodescope.options import RunOptions
    from decodescope.session import Session
    from decodescope.trace.records import Step, Trace
    from decodescope.trace.saved import read_trace

__version__ = "0.1.0"
__all__ = ["DecodescopeError", "InputError", "LiveRun", "RunOptions", "Session", "Step", "Trace", "read_trace"]

_HOMES = {
    "DecodescopeError": "decodescope.errors",
    "InputError": "decodescope.errors",
    "LiveRun": "decodescope.live",
    "RunOptions": "decodescope.options",
    "Session": "decodescope.session",
    "Step": "decodescope.trace.records",
    "Trace": "decodescope.trace.records",
    "read_trace": "decodescope.trace.saved",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
