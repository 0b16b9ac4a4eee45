"""Laws of the process that renders: one for many requests, of many threads, which outlives what a template does."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decodescope.text import template_process
from decodescope.text.template_process import TemplateProcess

LIMITS = {"cpu_s": 1, "wall_s": 20, "memory_bytes": 1 << 28}


@pytest.fixture
def process():
    process = TemplateProcess()
    yield process
    process.close()


def rendered(process: TemplateProcess, template: str, **context) -> str | dict:
    answer = process.answer({"template": template, "contexts": [context], **LIMITS})
    return answer["texts"][0] if "texts" in answer else answer


def test_many_threads_each_get_their_own_answer(process):
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: rendered(process, "{{ n }} 春\n", n=n), range(100)))
    assert texts == [f"{n} 春" for n in range(100)]


def test_one_process_answers_all_and_one_that_was_killed_is_started_again(process):
    rendered(process, "a")
    first = process._process
    rendered(process, "b")
    assert process._process is first
    first.send_signal(signal.SIGKILL)
    assert rendered(process, "c") == "c"
    assert process._process is not first


@pytest.mark.skipif(sys.platform == "win32", reason="no processor limit there; ends when Windows has one")
def test_a_template_that_takes_too_much_ends_itself_and_not_the_process(process):
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    rendered(process, "a")
    first = process._process
    assert rendered(process, endless) == {"fault": "limits"}
    assert rendered(process, "still {{ 'here' }}") == "still here"
    assert process._process is first


def test_nothing_of_one_request_is_left_for_the_next(process):
    rendered(process, "{% set ns = namespace(x=1) %}{% macro m() %}{% endmacro %}")
    assert rendered(process, "{{ ns is defined }} {{ m is defined }}") == "False False"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_the_process_is_told_no_secret_of_the_environment(process, monkeypatch):
    monkeypatch.setenv("DECODESCOPE_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    rendered(process, "a")
    told = Path(f"/proc/{process._process.pid}/environ").read_bytes()
    assert b"secret" not in told and b"TZ=UTC" in told


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Another program in place of ours."""

    def be(program: str) -> None:
        path = tmp_path / "worker.py"
        path.write_text(f"import sys\n{program}\n")
        monkeypatch.setattr(template_process, "_WORKER", path)

    return be


def test_many_complaints_are_in_nobodys_way(worker, process):
    worker("for _ in sys.stdin: sys.stderr.write('x' * (1 << 20)); print('{\"texts\": [\"here\"]}', flush=True)")
    assert rendered(process, "a") == rendered(process, "b") == "here"


def test_the_last_words_of_a_process_that_cannot_live_are_told(worker, process):
    worker("sys.exit('no such library')")
    assert rendered(process, "a") == {"fault": "failed", "reason": "no such library"}
