"""Our `llamacpp` chain against a real llama.cpp, step by step: its log-probs in, its own choices out.

llama.cpp tells the log-probs of the raw distribution, before any stage. A repetition penalty works on logits, which
lie one unknown number a step above them; asking for the same step again under a known penalty gives that number.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Choice, Sampler
from decodescope.text.tokenizer import open_tokenizer

xllamacpp = pytest.importorskip(
    "xllamacpp", reason="llama.cpp in process cannot be imported; ends where the package index has a wheel for this platform"
)  # fmt: skip

# The stages of ours that they call otherwise, and what switches each of theirs off: llama.cpp's own defaults do not.
NAMES = {"repetition_penalty": "repeat_penalty", "penalty_window": "repeat_last_n"}
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LISTED = 500  # log-probs a step: more than top-k keeps and penalties can push down together
STEPS = 16
PROMPT = (
    "The sea was calm and the sky was clear. The old man and the boy sat by the sea and looked at the boats. The "
    "boats were small, the sea was large, and the boy asked the old man whether the sea had an end. The old man said "
    "that the sea had no end that he had seen, and that the boats had no end that they had reached. The boy said"
)


class Llama:
    """A llama.cpp server in this process."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 512, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def complete(self, ids: list[int], count: int, **settings: Any) -> list[dict[str, Any]]:
        """For each of `count` tokens its `id` and the candidates, as llama.cpp's server writes them."""
        theirs = {NAMES.get(name, name): value for name, value in settings.items()}
        asked = {
            "prompt": ids,
            "n_predict": count,
            "n_probs": LISTED,
            "seed": 1,
            **OFF,
            **theirs,
        }
        steps: list[dict[str, Any]] = self._server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        return steps

    def logprobs(self, ids: list[int]) -> dict[int, float]:
        """Raw log-probs of the likeliest tokens behind `ids`."""
        return logprobs(self.complete(ids, 1)[0])

    def probs(self, ids: list[int], **settings: Any) -> dict[int, float]:
        """Final probabilities behind `ids`, after every stage, of the tokens that are left."""
        step = self.complete(ids, 1, post_sampling_probs=True, **settings)[0]
        return {each["id"]: each["prob"] for each in step["top_probs"]}

    def above(self, ids: list[int], raw: dict[int, float]) -> float:
        """How far the logits behind `ids` lie above their log-probs.

        The log of a final probability is the logit less a constant. Tokens not seen tell that constant; a seen
        token, whose logit x > 0 a penalty of 0.9 made x / 0.9, then tells x. All seen tokens give one answer.
        """
        final = self.probs(ids, samplers=["penalties"], repetition_penalty=0.9, penalty_window=len(ids))
        logs = {i: math.log(p) for i, p in final.items() if i in raw}
        constant = statistics.median(raw[i] - logs[i] for i in logs if i not in ids)
        answers = [(logs[i] + constant - raw[i] / 0.9) / (1 / 0.9 - 1) for i in logs if i in ids]
        assert answers and max(answers) - min(answers) < 1e-3
        return statistics.median(answers)


def logprobs(step: dict[str, Any]) -> dict[int, float]:
    return {each["id"]: each["logprob"] for each in step["top_logprobs"]}


@pytest.fixture(scope="module")
def prompt(small_path: Path) -> list[int]:
    ids = open_tokenizer(small_path).encode(PROMPT)
    assert len(ids) > 70  # its first tokens are out of the default window of 64
    return ids


@pytest.fixture(scope="module")
def llama(small_path: Path, prompt: list[int]) -> Llama:
    """Started, and with the prompt in its cache: read at one go, its last position has other logits (by 0.2 here)
    than computed alone, as it is for every request that finds the prompt cached."""
    server = Llama(small_path)
    server.complete(prompt, 1)
    return server


def ours(raw: dict[int, float], above: float, prompt: list[int], generated: list[int], **settings: Any) -> Choice:
    """Our choice from llama.cpp's log-probs; what it did not list is removed."""
    logits: Tensor = torch.full((max(raw) + 1,), -torch.inf)
    logits[list(raw)] = torch.tensor(list(raw.values())) + above
    return Sampler(SamplingParams(**settings, sampler="llamacpp", seed=1)).choose(logits, prompt, generated)


def test_llamacpp_tells_log_probs_from_before_every_stage(llama, prompt):
    plain = llama.logprobs(prompt)
    changed = llama.complete(prompt, 1, repetition_penalty=2.0, presence_penalty=1.0, temperature=0.5, top_k=3)[0]
    told = logprobs(changed)
    assert len(told) == LISTED and told == pytest.approx(plain, abs=1e-4)


GREEDY = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.15, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "penalty_window": 8},
]


@pytest.mark.parametrize("settings", GREEDY, ids=str)
def test_greedy_choices_are_llamacpps_with_and_without_penalties(llama, prompt, settings):
    generated: list[int] = []
    for step in llama.complete(prompt, STEPS, **settings):
        raw, ids = logprobs(step), prompt + generated
        above = llama.above(ids, raw) if "repetition_penalty" in settings else 0.0
        assert ours(raw, above, prompt, generated, **settings).token_id == step["id"], len(generated)
        generated.append(step["id"])
    assert len(generated) == STEPS


def test_penalties_change_the_greedy_choices_and_so_do_the_prompt_and_the_window(llama, prompt):
    """Were it not so, the test above would say nothing about them."""
    paths = [[step["id"] for step in llama.complete(prompt, STEPS, **settings)] for settings in GREEDY]
    assert len({tuple(path) for path in paths}) == len(GREEDY)
    settings = GREEDY[2]
    raw = llama.logprobs(prompt)
    found = ours(raw, 0.0, prompt, [], **settings)
    assert found.token_id == llama.complete(prompt, 1, **settings)[0]["id"]
    assert not torch.equal(found.final, ours(raw, 0.0, [], [], **settings).final)
    assert not torch.equal(found.final, ours(raw, 0.0, prompt, [], penalty_window=0, **settings).final)


DRAWN = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("settings", DRAWN, ids=str)
def test_drawn_tokens_come_from_the_same_distribution(llama, prompt, settings):
    generated: list[int] = []
    for step in llama.complete(prompt, STEPS, **settings):
        raw, ids = logprobs(step), prompt + generated
        above = llama.above(ids, raw) if "repetition_penalty" in settings else 0.0
        final = ours(raw, above, prompt, generated, **settings).final.softmax(-1)
        theirs = llama.probs(ids, **settings)
        assert step["id"] in theirs
        found = {i: float(final[i]) for i in torch.nonzero(final)[:, 0].tolist()}
        assert found == pytest.approx(theirs, rel=1e-3), len(generated)
        generated.append(step["id"])
    assert len(generated) == STEPS
