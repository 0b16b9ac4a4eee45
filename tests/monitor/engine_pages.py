"""Metrics pages: ours from hand-made steps, and those of other engines as they write them, counted up by the clock."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Page = Callable[[str], tuple[bytes, str]]  # of an Accept header: text and content type
PLAIN = "text/plain; version=0.0.4"


@contextmanager
def served(page: Page, token: str | None = None) -> Iterator[str]:
    """A page on a loopback port; gives HOST:PORT. With a token, whoever lacks it gets 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = token is None or self.headers["Authorization"] == f"Bearer {token}"
            body, kind = page(self.headers.get("Accept", "")) if allowed else (b"", PLAIN)
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _histogram(name: str, labels: str, count: int, bounds: tuple[str, ...] = ("0.1", "0.5", "1.0", "+Inf")) -> str:
    """As many values in each bucket up to 1."""
    lines = [f"# TYPE {name} histogram"]
    finite = len(bounds) - 1
    lines += [f'{name}_bucket{{{labels},le="{le}"}} {min(i + 1, finite) * count}.0' for i, le in enumerate(bounds)]
    lines += [f"{name}_sum{{{labels}}} {count * 1.0}", f"{name}_count{{{labels}}} {finite * count}.0"]
    return "\n".join(lines)


def _lines(kind: str, values: dict[str, float]) -> str:
    return "\n".join(f"# TYPE {name.partition('{')[0]} {kind}\n{name} {value}" for name, value in values.items())


def vllm(accept: str) -> tuple[bytes, str]:
    """In the words of vllm/v1/metrics/loggers.py."""
    labels, ticks = 'engine="0",model_name="big"', int(time.time() * 10) % 10_000_000
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")
    text = [
        _lines("gauge", {f"vllm:num_requests_running{{{labels}}}": 5.0, f"vllm:num_requests_waiting{{{labels}}}": 2.0}),
        _lines("gauge", {f"vllm:kv_cache_usage_perc{{{labels}}}": 0.25}),
        _lines("counter", {f"vllm:{n}_total{{{labels}}}": ticks * 4.0 for n in ("generation_tokens", "prompt_tokens", "prefix_cache_queries")}),
        _lines("counter", {f"vllm:prefix_cache_hits_total{{{labels}}}": ticks * 1.0}),
        _lines("counter", {f'vllm:request_success_total{{{labels},finished_reason="stop"}}': ticks / 10}),
        *(_histogram(f"vllm:{name}_seconds", labels, ticks) for name in names),
    ]  # fmt: skip
    return ("\n".join(text) + "\n").encode(), PLAIN


def sglang(accept: str) -> tuple[bytes, str]:
    """In the words of python/sglang/srt/metrics/collector.py."""
    labels, ticks = 'model_name="big"', int(time.time() * 10) % 10_000_000
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "queue_time")
    gauges = {"num_running_reqs": 5.0, "num_queue_reqs": 2.0, "token_usage": 0.25}
    counters = {
        "generation_tokens_total": 4,
        "prompt_tokens_total": 4,
        "cached_tokens_total": 1,
        "num_requests_total": 0.1,
    }
    text = [
        _lines("gauge", {f"sglang:{name}{{{labels}}}": value for name, value in gauges.items()}),
        _lines("counter", {f"sglang:{name}{{{labels}}}": value * ticks for name, value in counters.items()}),
        *(_histogram(f"sglang:{name}_seconds", labels, ticks) for name in names),
    ]  # fmt: skip
    return ("\n".join(text) + "\n").encode(), PLAIN


def llamacpp(accept: str) -> tuple[bytes, str]:
    """In the words of llama.cpp's tools/server/server-task.cpp: no labels, no histograms."""
    ticks = int(time.time() * 10) % 10_000_000
    counters = {"prompt_tokens_total": 3, "prompt_tokens_cached_total": 1, "tokens_predicted_total": 4}
    text = [
        _lines("counter", {f"llamacpp:{name}": value * ticks for name, value in counters.items()}),
        _lines("gauge", {"llamacpp:requests_processing": 5, "llamacpp:requests_deferred": 2}),
    ]
    return ("\n".join(text) + "\n").encode(), PLAIN
