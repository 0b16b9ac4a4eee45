"""llama.cpp, in the build that `xllamacpp` brings: its server inside this process, asked for completions."""

import importlib.metadata
from pathlib import Path
from typing import Any

import xllamacpp

from decodescope.experiments.bench.messages import DecodeTask, Opened, PrefillTask, Setup, Timed
from decodescope.formats.gguf import read_header
from decodescope.model.cost import kv_bytes_per_token
from decodescope.model.gguf_config import config_from_gguf

_CACHE_VALUE_BYTES = 2  # its keys and values are float16 where nothing else is asked for


class Engine:
    """A server for one sequence."""

    def __init__(self, setup: Setup) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = setup.path
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = setup.most_tokens, 1, True, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        self._server = xllamacpp.Server(params)
        self._told: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        header = read_header(Path(setup.path))
        sizes = {name: info.bytes for name, info in header.tensors.items()}
        looked_up = sizes["token_embd.weight"] if "output.weight" in sizes else 0
        self._position_bytes = kv_bytes_per_token(config_from_gguf(header), _CACHE_VALUE_BYTES)
        self.opened = Opened(
            version=importlib.metadata.version("xllamacpp"),
            build=" ".join(xllamacpp.get_system_info().split()).rstrip(" |"),
            weights_bytes=sum(sizes.values()),
            step_bytes=sum(sizes.values()) - looked_up,
        )

    def decode(self, task: DecodeTask) -> Timed:
        """By its own clock, which starts with the first new token: that one is counted and took no time."""
        prompt, count = task.prompts[0], task.new_tokens + 1
        timings = self._complete(prompt, count)["timings"]
        seconds, timed = timings["predicted_ms"] / 1e3, timings["predicted_n"] - 1
        return Timed(seconds, timed, self._ids(prompt, count), self._position_bytes)

    def prefill(self, task: PrefillTask) -> Timed:
        """By its own clock."""
        timings = self._complete(task.prompt, 1)["timings"]
        return Timed(timings["prompt_ms"] / 1e3, timings["prompt_n"])

    def _ids(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The new tokens, asked for once more: telling them costs time, which must not be in the time measured."""
        key = (prompt, count)
        if key not in self._told:
            steps = self._complete(prompt, count, n_probs=1)["choices"][0]["logprobs"]["content"]
            self._told[key] = tuple(step["id"] for step in steps)
        return self._told[key]

    def _complete(self, prompt: tuple[int, ...], count: int, **more: int) -> dict[str, Any]:
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0.0, "ignore_eos": True, **more}
        answer: dict[str, Any] = self._server.handle_completions({**asked, "cache_prompt": False})
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
