"""Entry point: choose the language, run a command, turn faults into one line and an exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from io import StringIO, TextIOWrapper
from itertools import pairwise

from decodescope.errors import DecodescopeError, FindingError, InputError
from decodescope.locale import LANGUAGES, set_language, translate
from decodescope.visible import visible

_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
EXIT_FINDING, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 a finding, 2 wrong use, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Read when torch loads: threads that wait for each other spin briefly, then sleep. Spinning on costs most of
    # the speed as soon as another process wants the same cores (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _prepare_streams(json="--json" in arguments or arguments[:1] == ["export"])
    try:
        set_language(_language(arguments))
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except FindingError as fault:
        return _say(fault, EXIT_FINDING)
    except DecodescopeError as fault:
        return _say(fault, EXIT_USAGE)
    except KeyboardInterrupt:
        return _say(translate("error.interrupted"), EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); nothing is left to say, not even at exit.
        _drop_output()
        return 0
    except OSError as fault:
        if fault.errno not in _UNWRITABLE or fault.filename is not None:
            raise
        _drop_output()
        return _say(translate("error.output", reason=fault.strerror or fault), EXIT_USAGE)


def _prepare_streams(json: bool) -> None:
    """Closed streams lead nowhere; JSON is UTF-8 whatever the locale; else the unwritable is escaped."""
    sys.stdout = sys.stdout or StringIO()
    sys.stderr = sys.stderr or StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if json and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def _drop_output() -> None:
    """What is still buffered can go nowhere; not even a complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    # Imported late: the help texts are read in the language just chosen.
    from typer import Abort
    from typer.exceptions import TyperException

    from decodescope.cli.app import app

    try:
        code = app(arguments, prog_name="decodescope", standalone_mode=False)
    except TyperException as fault:
        return _say(fault.format_message(), EXIT_USAGE)
    except Abort:
        raise KeyboardInterrupt from None
    except SystemExit:  # how Typer and Rich leave when the reader has gone; their code 1 would be a finding
        raise BrokenPipeError from None
    if code == EXIT_INTERRUPTED:  # the library turns Ctrl-C into this code and says nothing
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _say(fault: object, code: int) -> int:
    line = visible(" ".join(str(fault).split()))
    print(f"decodescope: error: {line}", file=sys.stderr)
    return code


def _language(arguments: list[str]) -> str | None:
    """The value of --lang, wherever it stands; looked up before anything is parsed."""
    given = [a.partition("=")[2] for a in arguments if a.startswith("--lang=")]
    given += [value for option, value in pairwise(arguments) if option == "--lang"]
    if given and given[0] not in LANGUAGES:
        raise InputError("lang.unknown", name=given[0], known=", ".join(LANGUAGES))
    return given[0] if given else None
