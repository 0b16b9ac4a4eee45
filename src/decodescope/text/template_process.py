"""The process that renders chat templates: one for all requests, which forks a child for each."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

_GRACE_S = 5  # beyond the time that the process grants itself
# What Python needs, and the clock's zone: none of the tokens and keys that an environment may hold.
_ENVIRONMENT = (
    "PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "LC_ALL", "LC_CTYPE", "TZ",
)  # fmt: skip
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Started when first asked, and again when it has gone; any thread may ask, one at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        atexit.register(self.close)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What `template_worker.answer` says; its `fault` is `limits` where that took too much."""
        line = json.dumps(request).encode() + b"\n"
        with self._turn:
            said = _asked(self._running(), line, request["wall_s"])
            if not said:
                said = _asked(self._started(), line, request["wall_s"])
            if not said:
                return {"fault": "failed", "reason": self._last_words()}
            return dict(json.loads(said))

    def close(self) -> None:
        """Let the process end; the next request starts another."""
        with self._turn:
            self._last_words()

    def _running(self) -> subprocess.Popen[bytes]:
        return self._started() if self._process is None else self._process

    def _started(self) -> subprocess.Popen[bytes]:
        self._last_words()
        command = [sys.executable, "-P", str(_WORKER)]  # -P: nothing is imported from where the user stands
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill up)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._complaints, env=environment
        )
        return self._process

    def _last_words(self) -> str:
        """End the process; the last line of its complaints."""
        process, self._process = self._process, None
        if process is None or self._complaints is None:
            return ""
        process.communicate()
        with self._complaints as complaints:
            complaints.seek(0)
            return complaints.read().decode("utf-8", "replace").strip().rpartition("\n")[2]


def _asked(process: subprocess.Popen[bytes], line: bytes, wall_s: float) -> bytes:
    """The line it answers, empty where it has gone; one that keeps neither its time nor ours is killed."""
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(wall_s + _GRACE_S, process.kill)
    late.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:
        return b""
    finally:
        late.cancel()
