"""A real Prometheus on a loopback port, started with any configuration, asked by its API, and ended with the test."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WHY_NOT = "no Prometheus: `make test` installs it as root on Debian (apt-get install prometheus)"
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=WHY_NOT)
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason=WHY_NOT)
START_S = 30
Found = TypeVar("Found")
Sample = tuple[dict[str, str], float]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def promtool(*arguments: str | Path) -> None:
    """Run promtool; what it complains about fails the test."""
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for(look: Callable[[], Found], seconds: float, what: str) -> Found:
    """The first true answer of `look`."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return found


class PrometheusServer:
    """What a running Prometheus answers."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as answer:
            answer.close()  # 503 while it starts
            return False
        except OSError:
            return False

    def query(self, expr: str) -> list[Sample]:
        """The series of an expression now."""
        found = self._get("query", query=expr)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def query_range(self, expr: str, seconds: float, step: float) -> list[tuple[dict[str, str], list[float]]]:
        """The series of an expression over the last `seconds`."""
        end = time.time()
        found = self._get("query_range", query=expr, start=end - seconds, end=end, step=step)["result"]
        return [(each["metric"], [float(value) for _, value in each["values"]]) for each in found]

    def exemplars(self, expr: str) -> list[dict[str, str]]:
        """The labels of the exemplars of the last minute."""
        end = time.time()
        found = self._get("query_exemplars", query=expr, start=end - 60, end=end + 60)
        return [each["labels"] for series in found for each in series["exemplars"]]

    def targets(self) -> dict[str, str]:
        """Health (up, down, unknown) by instance."""
        return {each["labels"]["instance"]: each["health"] for each in self._get("targets")["activeTargets"]}

    def rules(self) -> dict[str, str]:
        """Health (ok, err, unknown) and last fault by the name of each rule."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule["health"] + rule.get("lastError", "") for rule in rules}

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = self._get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def _get(self, what: str, **fields: object):
        asked = urllib.parse.urlencode({name: str(value) for name, value in fields.items()})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{asked}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as answer:
            with answer:
                raise AssertionError(f"{fields}: {answer.read().decode()}") from None


def let_scrapes_take(config: Path, seconds: float) -> None:
    """Scrape as often as a scrape may take.

    What it does take does not shrink with the pace of the rules. A server that is slow, or whose machine is busy,
    would lose its scrapes at a quick pace: it would count as lost, and have no speed at all.
    """
    text = f"{1000 * seconds:.0f}ms"
    config.write_text(re.sub(r"(scrape_interval|scrape_timeout): .*", rf"\1: {text}", config.read_text()))


@contextmanager
def running_prometheus(config: Path, data: Path) -> Iterator[PrometheusServer]:
    """Start it, wait until it answers, and end it. Its own log shows when it does not start."""
    address = f"127.0.0.1:{free_port()}"
    log = data.with_suffix(".log")
    command = [
        str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            server = PrometheusServer(address)
            wait_for(lambda: server.ready() or process.poll() is not None, START_S, log.read_text())
            assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.kill()
