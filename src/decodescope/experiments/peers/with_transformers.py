"""transformers: `generate` on its own model, the weights read by us, so that no engine has other numbers."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from decodescope.experiments.bench.messages import DecodeTask, Opened, PrefillTask, Setup, Timed
from decodescope.model.cost import kv_bytes_per_token
from decodescope.model.random_weights import RandomWeights
from decodescope.model.weights import Weights, open_weights


class Engine:
    """A model of transformers, dense in the format's dtype, with its default attention."""

    def __init__(self, setup: Setup) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(setup.threads)
        dtype, self._device = getattr(torch, setup.format), torch.device(setup.device)
        weights = RandomWeights(Path(setup.random)) if setup.random else open_weights(Path(setup.path))
        self._model = _model(weights, dtype).to(self._device)
        self._position_bytes = kv_bytes_per_token(weights.config, dtype.itemsize)
        matrices = dict(self._model.named_parameters())  # a tied head once, under the embedding's name
        held = sum(weight.nbytes for weight in matrices.values())
        looked_up = 0 if weights.config.tie_word_embeddings else matrices["model.embed_tokens.weight"].nbytes
        self.opened = Opened(
            version=transformers.__version__,
            build=f"torch {torch.__version__}, {self._model.config._attn_implementation}",
            activations=setup.format,
            weights_bytes=held,
            step_bytes=held - looked_up,
        )

    def decode(self, task: DecodeTask) -> Timed:
        """`generate`, a streamer telling when each token came."""
        ids, ticker = self._tensor(task.prompts[0]), Ticker()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task.new_tokens + 1,
            do_sample=False,
            streamer=ticker,
        )
        new = tuple(out[0, ids.shape[1] :].tolist())
        return Timed(sum(ticker.seconds), len(ticker.seconds), new, self._position_bytes)

    @torch.inference_mode()
    def prefill(self, task: PrefillTask) -> Timed:
        """One pass, its cache kept, the last position's logits."""
        ids = self._tensor(task.prompt)
        started = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits.cpu()
        return Timed(time.perf_counter() - started, len(task.prompt))

    def _tensor(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor([ids], device=self._device)


class Ticker:
    """A streamer for `generate`: when the prompt and each new token came."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Tensor) -> None:
        """Called with the prompt, then with every token."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Called at the end."""

    @property
    def seconds(self) -> list[float]:
        """Of every new token behind the first."""
        return [after - before for before, after in pairwise(self.moments[1:])]


def _model(weights: Weights, dtype: torch.dtype) -> Any:
    """Its own model around tensors that we read. Raises RuntimeError where it asks for others."""
    path = weights.path
    of_gguf = (path.parent, {"gguf_file": path.name}) if path.is_file() and path.suffix != ".json" else None
    place, named = of_gguf or (path, {})
    config = transformers.AutoConfig.from_pretrained(place, **named)
    config.tie_word_embeddings = weights.config.tie_word_embeddings
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = {name: weights.read(name, dtype) for name, _ in weights.config.tensor_shapes()}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    tied = {"lm_head.weight"} if weights.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise RuntimeError(f"transformers wants other tensors: {[*unexpected, *missing][:4]}")
    model.generation_config = transformers.GenerationConfig()
    return model.eval()
