"""What servers export, as text: ours from real counters, the others' as their sources name it; and a server for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from decodescope.trace.records import Intervention, Kv, Memory, Stage, Step, Timing


def step(index: int, token_id: int = 7, **changes: Any) -> Step:
    """A step with figures that are easy to add up."""
    given = dict(
        step=index, position=10 + index, token_id=token_id, bytes_hex="61", text="a", delta_text="a", node=index,
        parent=index - 1 if index else None, rank=1, logprob_nats=-0.5, prob=0.6, prob_final=0.7, entropy_nats=1.25,
        margin_logits=3.5, candidates=(), stages=(Stage("top_k", {}, 10, 0.5, 1.0), Stage("top_p", {}, 5, 0.5, 0.5)),
        kv=Kv(1, 1, 1), timing=Timing(0.03, 0.001, 0.032), memory=Memory(1, None),
    )  # fmt: skip
    return Step(**{**given, **changes})


STOPPED = Intervention("loop", "stop", 64.0, 64.0, None)


def histogram(name: str, labels: str, counts: dict[str, int], total: float) -> str:
    """A histogram as it is written; `counts` are cumulative."""
    buckets = "".join(f'{name}_bucket{{{labels}le="{le}"}} {count}\n' for le, count in counts.items())
    plain = f"{{{labels.rstrip(',')}}}" if labels else ""
    count = list(counts.values())[-1]
    return f"# TYPE {name} histogram\n{buckets}{name}_count{plain} {count}\n{name}_sum{plain} {total}\n"


def vllm(tokens: int = 100, firsts: int = 10, hits: int = 40, model: str = "Qwen/Qwen2.5-7B-Instruct") -> str:
    """As vllm/v1/metrics/loggers.py names it; one engine."""
    labels = f'engine="0",model_name="{model}"'
    first = {"0.1": 0, "0.25": firsts // 2, "0.5": firsts, "+Inf": firsts}
    each = {"0.01": 0, "0.025": tokens, "0.05": tokens, "+Inf": tokens}
    return (
        f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} 0.97
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{{labels}}} {10 * firsts}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{{labels}}} {hits}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{labels}}} {10 * firsts}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{labels}}} {tokens}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{{labels},finished_reason="stop"}} {firsts}
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1.5e+09
"""
        + histogram("vllm:time_to_first_token_seconds", labels + ",", first, 0.3 * firsts)
        + histogram("vllm:inter_token_latency_seconds", labels + ",", each, 0.02 * tokens)
    )


def sglang(tokens: int = 100, prompt: int = 200, cached: int = 50) -> str:
    """As sglang/srt/observability/metrics_collector.py names it."""
    labels = 'engine_type="unified",model_name="Qwen/Qwen2.5-7B-Instruct",tp_rank="0"'
    return f"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{labels}}} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{{labels}}} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{{{labels}}} 0.28
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{{{labels}}} 0.01
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{{labels},is_streaming="true"}} {prompt}
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{{labels},is_streaming="true"}} {tokens}
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{{{labels},cache_source="device"}} {cached}
"""


def llama_server(tokens: int = 100, prompt: int = 150, cached: int = 50) -> str:
    """As tools/server/server-task.cpp of llama.cpp names it: no labels, no histograms."""
    return f"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total {cached}
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {tokens}
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds nan
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A real HTTP server on the loopback that answers GET as told; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sends(
    text: Callable[[], str | bytes], status: int = 200, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers with a text, made anew each time."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        given = text()
        body = given if isinstance(given, bytes) else given.encode()
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def growing(made: Callable[[int], str]) -> Callable[[], str]:
    """A text that differs each time it is asked for: of 1, 2, 3 ..."""
    asked = iter(range(1, 1000))
    return lambda: made(next(asked))
