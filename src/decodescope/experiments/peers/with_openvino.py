"""OpenVINO GenAI: its pipeline on the GGUF file, which it converts while it loads."""

from typing import Any

import numpy as np
import openvino
import openvino_genai

from decodescope.experiments.bench.messages import DecodeTask, Opened, PrefillTask, Setup, Timed


class Engine:
    """A pipeline on the CPU. What it makes of the weights it does not tell."""

    def __init__(self, setup: Setup) -> None:
        self._pipeline: Any = openvino_genai.LLMPipeline(setup.path, "CPU", INFERENCE_NUM_THREADS=setup.threads)
        self.opened = Opened(
            version=openvino_genai.get_version(), build=f"openvino {openvino.get_version()}", kernels=None
        )

    def decode(self, task: DecodeTask) -> Timed:
        """By its own clock: the mean time of the tokens behind the first."""
        result = self._generate(task.prompts[0], task.new_tokens + 1)
        ids = tuple(result.tokens[0])
        timed = len(ids) - 1
        return Timed(result.perf_metrics.get_tpot().mean / 1e3 * timed, timed, ids)

    def prefill(self, task: PrefillTask) -> Timed:
        """By its own clock: the time to the first token."""
        result = self._generate(task.prompt, 1)
        return Timed(result.perf_metrics.get_ttft().mean / 1e3, len(task.prompt))

    def _generate(self, prompt: tuple[int, ...], count: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return self._pipeline.generate(inputs, config)
