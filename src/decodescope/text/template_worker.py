"""Renders chat templates, run as a script: a JSON request a line on stdin, a JSON answer a line on stdout.

A template comes with the model and is a stranger's program. Jinja's sandbox keeps it from the interpreter's
inside but not from looping or growing for ever, so each request runs in a process of its own, within the time and
memory that it grants: a fork of this one, which has read its libraries already. Rules and extras are those of
transformers' chat templates.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LONGEST_TEXT = 1 << 24  # characters; far beyond any context


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which is not allowed")


class _Namespace(Namespace):
    """A `namespace()` that holds no underscored names, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _refuse_underscore(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it stores a value under {name!r}, which is not allowed")


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals.update(raise_exception=_raise, strftime_now=_clock(), namespace=_Namespace)
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _clock() -> Callable[[str], str]:
    """One moment for all renderings of a request, so that they can be compared."""
    return datetime.now().strftime


def _limit(cpu_s: int, memory_bytes: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no such limits; there the caller's time limit is the only one


def _text(template: Template, context: dict[str, Any]) -> str:
    text = template.render(context)
    if len(text) > _LONGEST_TEXT:
        raise MemoryError
    return text


def _attempt(template: Template, context: dict[str, Any]) -> str | None:
    try:
        return _text(template, context)
    except Exception:
        return None


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`texts`, one per context; the first must render, others may be None. Or a `fault` with its `reason`."""
    try:
        template = environment().from_string(request["template"])
        first, *others = request["contexts"]
        return {"texts": [_text(template, first), *(_attempt(template, context) for context in others)]}
    except (MemoryError, RecursionError):
        return {"fault": "limits"}
    except TemplateSyntaxError as fault:
        return {"fault": "failed", "reason": f"{fault.message} (line {fault.lineno} of the template)"}
    except Exception as fault:
        return {"fault": "failed", "reason": str(fault) or type(fault).__name__}


def _say(request: dict[str, Any]) -> None:
    _limit(request["cpu_s"], request["memory_bytes"])
    print(json.dumps(answer(request)), flush=True)


def _in_a_fork(request: dict[str, Any]) -> None:
    """A child says it; where its time or memory ran out, we say so."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])  # ends it, as the limit of processor time does
        _say(request)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps({"fault": "limits"}), flush=True)


def main() -> None:
    handle = _in_a_fork if hasattr(os, "fork") else _say
    for line in sys.stdin:
        handle(json.loads(line))


if __name__ == "__main__":
    main()
