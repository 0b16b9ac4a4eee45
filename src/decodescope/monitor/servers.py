"""What the servers that can be watched call their figures.

Names were read in vLLM (vllm/v1/metrics/loggers.py), SGLang (python/sglang/srt/observability/metrics_collector.py)
and llama.cpp (tools/server/server-task.cpp); where a release renamed one, the old name follows the new.
"""

from dataclasses import dataclass

from decodescope.monitor.series import PREFIX

TOKEN_VARIABLE = "DECODESCOPE_TOKEN"  # of the environment: the token of our own server, for it and for who watches
Names = tuple[str, ...]  # the same figure by the names of several releases, the newest first; none: not exported


@dataclass(frozen=True, slots=True)
class Server:
    """A kind of server. Of `prompt` and `looked_up` the figures add up; histograms are named without a suffix."""

    name: str
    prefix: str
    generated: Names  # tokens
    prompt: tuple[Names, ...]  # tokens
    running: Names  # requests
    waiting: Names
    found: Names = ()  # prompt tokens in the prefix cache
    looked_up: tuple[Names, ...] = ()  # prompt tokens
    hit_ratio: Names = ()  # the server's own figure, where it counts no tokens
    first_token: Names = ()  # histograms, seconds
    each_token: Names = ()
    kv_usage: Names = ()  # from 0 to 1
    kv_used: Names = ()
    kv_capacity: Names = ()
    resident: Names = ("process_resident_memory_bytes",)  # of any server in Python with the usual collector

    @property
    def all_names(self) -> frozenset[str]:
        """Every name here, those of a histogram's parts too."""
        sums = [name for names in (*self.prompt, *self.looked_up) for name in names]
        histograms = [*self.first_token, *self.each_token]
        parts = [name + part for name in histograms for part in ("_bucket", "_sum", "_count")]
        gauges = [*self.running, *self.waiting, *self.hit_ratio, *self.kv_usage, *self.kv_used, *self.kv_capacity]
        return frozenset([*self.generated, *sums, *parts, *gauges, *self.found, *self.resident])


def _own(name: str) -> Names:
    return (PREFIX + name,)


OURS = Server(
    name="decodescope",
    prefix=PREFIX,
    generated=_own("generation_tokens_total"),
    prompt=(_own("prompt_tokens_total"),),
    running=_own("requests_running"),
    waiting=_own("requests_waiting"),
    found=_own("prefix_cache_hit_tokens_total"),
    looked_up=(_own("prefix_cache_query_tokens_total"),),
    first_token=_own("time_to_first_token_seconds"),
    each_token=_own("inter_token_latency_seconds"),
    kv_used=_own("kv_cache_used_bytes"),
    kv_capacity=_own("kv_cache_capacity_bytes"),
    resident=_own("process_resident_bytes"),
)
VLLM = Server(
    name="vLLM",
    prefix="vllm:",
    generated=("vllm:generation_tokens_total",),
    prompt=(("vllm:prompt_tokens_total",),),
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    found=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    looked_up=(("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),),
    first_token=("vllm:time_to_first_token_seconds",),
    each_token=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
)
SGLANG = Server(  # counts a request's tokens when it has ended
    name="SGLang",
    prefix="sglang:",
    generated=("sglang:generation_tokens_total",),
    prompt=(("sglang:prompt_tokens_total",),),
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    found=("sglang:cached_tokens_total",),
    looked_up=(("sglang:prompt_tokens_total",),),
    hit_ratio=("sglang:cache_hit_rate",),
    first_token=("sglang:time_to_first_token_seconds",),
    each_token=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    kv_usage=("sglang:token_usage",),
)
LLAMA_SERVER = Server(  # counts prompt tokens that it found cached apart from those it computed; has no histograms
    name="llama-server",
    prefix="llamacpp:",
    generated=("llamacpp:tokens_predicted_total",),
    prompt=(("llamacpp:prompt_tokens_total",), ("llamacpp:prompt_tokens_cached_total",)),
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    found=("llamacpp:prompt_tokens_cached_total",),
    looked_up=(("llamacpp:prompt_tokens_total",), ("llamacpp:prompt_tokens_cached_total",)),
    kv_usage=("llamacpp:kv_cache_usage_ratio",),
    resident=(),
)
SERVERS = (OURS, VLLM, SGLANG, LLAMA_SERVER)
