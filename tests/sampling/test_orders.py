"""Three engines' orders: four or five tokens worked out by hand, where each order leaves something else."""

import pytest
import torch
from torch import Tensor

from decodescope.sampling.orders import PRESETS, STAGES
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler

FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def final(
    logits: Tensor, prompt: list[int] | None = None, generated: list[int] | None = None, **settings
) -> Tensor:
    return Sampler(SamplingParams(**settings, seed=1)).choose(logits, prompt or [], generated or []).final


def probs(logits: Tensor, **settings) -> list[float]:
    """The final probabilities in percent, to a hundredth."""
    return [round(100 * p, 2) for p in final(logits, **settings).softmax(-1).tolist()]


def test_every_preset_has_every_stage_once():
    for preset in PRESETS.values():
        assert sorted(preset.order) == sorted(STAGES)


# At temperature 2 the weights are the square roots of 0.5 0.25 0.15 0.1: 0.7071 0.5 0.3873 0.3162, in all 1.9106.
# hf, vllm: 37.01 26.17 20.27 16.55 %, so that three tokens reach 0.7 (37.01 + 26.17 = 63.18 is less);
#           0.7071 0.5 0.3873 of 1.5944 are 44.35 31.36 24.29 %.
# llamacpp: 50 + 25 = 75 % reach 0.7 before the temperature; 0.7071 0.5 of 1.2071 are 58.58 41.42 %.
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("hf", [44.35, 31.36, 24.29, 0]), ("vllm", [44.35, 31.36, 24.29, 0]), ("llamacpp", [58.58, 41.42, 0, 0])],
)
def test_top_p_sees_the_heated_distribution_or_the_cold_one(sampler, expected):
    assert probs(FOUR, sampler=sampler, temperature=2.0, top_p=0.7) == expected


# min-p 0.25 removes what is under a quarter of 50 %: the last token, 10 %.
# vllm: that comes first; of the 90 % left the first two are 55.56 + 27.78 = 83.33 %, which reach 0.8 (66.67 33.33 %).
# hf, llamacpp: of all, 50 + 25 = 75 % do not reach 0.8, so three tokens stay; min-p keeps them (55.56 27.78 16.67 %).
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("hf", [55.56, 27.78, 16.67, 0]), ("vllm", [66.67, 33.33, 0, 0]), ("llamacpp", [55.56, 27.78, 16.67, 0])],
)
def test_min_p_takes_its_mass_away_before_top_p_or_after(sampler, expected):
    assert probs(FOUR, sampler=sampler, temperature=1.0, top_p=0.8, min_p=0.25) == expected


# Temperature 2, top-p 0.74, min-p 0.52. Heated, the tokens have 1 0.7071 0.5477 0.4472 of the best one's probability.
# hf:       37.01 + 26.17 = 63.18 % are too few, three tokens reach 0.74; min-p keeps the three (0.5477 > 0.52).
# vllm:     min-p keeps three (44.35 31.36 24.29 %); 44.35 + 31.36 = 75.71 % reach 0.74: two tokens.
# llamacpp: cold, 50 + 25 = 75 % reach 0.74; the second has half the best one's probability, under 0.52: one token.
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("hf", [44.35, 31.36, 24.29, 0]), ("vllm", [58.58, 41.42, 0, 0]), ("llamacpp", [100, 0, 0, 0])],
)
def test_one_setting_leaves_three_different_distributions(sampler, expected):
    assert probs(FOUR, sampler=sampler, temperature=2.0, top_p=0.74, min_p=0.52) == expected


# Top-k 3 leaves 50 25 15 of 90: 55.56 27.78 16.67 %, and 55.56 + 27.78 reach 0.8. All presets cut k first.
@pytest.mark.parametrize("sampler", PRESETS)
def test_top_k_comes_before_top_p_everywhere(sampler):
    assert probs(FOUR, sampler=sampler, temperature=1.0, top_k=3, top_p=0.8) == [66.67, 33.33, 0, 0]


# Repetition 2 halves tokens 0 and 1: 2 -> 1, 1 -> 0.5 (a negative logit doubles: -1 -> -2, token 3 in the prompt).
# Token 1 was generated twice: 0.5 - 2 x 0.5 (frequency) - 0.25 (presence) = -0.75.
# llamacpp counts the prompt too: token 0 once, 1 - 0.5 - 0.25 = 0.25; token 3 once, -2 - 0.75 = -2.75.
@pytest.mark.parametrize(
    ("sampler", "expected", "choice"),
    [("hf", [1.0, -0.75, 0.5, -2.0], 0), ("vllm", [1.0, -0.75, 0.5, -2.0], 0), ("llamacpp", [0.25, -0.75, 0.5, -2.75], 2)],
)  # fmt: skip
def test_presence_and_frequency_penalties_count_the_prompt_or_not(sampler, expected, choice):
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    settings = dict(sampler=sampler, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    left = final(logits, [3, 0], [1, 1], **settings)
    assert left.tolist() == expected and int(left.argmax()) == choice


# The last 64 tokens of 65: the first of the prompt, token 0, is out of llama.cpp's sight, and in that of the others.
@pytest.mark.parametrize(
    ("sampler", "expected"), [("hf", [2.0, 2.0]), ("vllm", [2.0, 2.0]), ("llamacpp", [4.0, 2.0])]
)
def test_llamacpp_forgets_what_lies_64_tokens_back(sampler, expected):
    prompt, generated = [0, *[1] * 60], [1] * 4
    assert (
        final(torch.full((2,), 4.0), prompt, generated, sampler=sampler, repetition_penalty=2.0).tolist()
        == expected
    )
    prompt = prompt[1:]
    assert (
        final(torch.full((2,), 4.0), [0, *prompt[1:]], generated, sampler=sampler, repetition_penalty=2.0)[0]
        == 2.0
    )


# A window of 2 over prompt 0 1 and generated 2 2 3 sees 2 3 (2 once), a window of 0 everything.
@pytest.mark.parametrize(
    ("sampler", "window", "repeated", "counted"),
    [("hf", 2, [4, 4, 2, 2], [4, 4, 3, 3]), ("vllm", 2, [4, 4, 2, 2], [4, 4, 3, 3]), ("llamacpp", 2, [4, 4, 2, 2], [4, 4, 3, 3]),
     ("hf", 4, [4, 2, 2, 2], [4, 4, 2, 3]), ("llamacpp", 4, [4, 2, 2, 2], [4, 3, 2, 3]),
     ("hf", 0, [2, 2, 2, 2], [4, 4, 2, 3]), ("llamacpp", 0, [2, 2, 2, 2], [3, 3, 2, 3])],
)  # fmt: skip
def test_a_penalty_window_ends_what_the_penalties_look_back_at(sampler, window, repeated, counted):
    logits, around = torch.full((4,), 4.0), ([0, 1], [2, 2, 3])
    settings = dict(sampler=sampler, penalty_window=window)
    assert final(logits, *around, **settings, repetition_penalty=2.0).tolist() == repeated
    assert final(logits, *around, **settings, frequency_penalty=1.0).tolist() == counted
    once = [min(4, max(value, 3)) for value in counted]
    assert final(logits, *around, **settings, presence_penalty=1.0).tolist() == once


def test_the_n_gram_ban_looks_at_everything_whatever_the_window():
    for sampler in PRESETS:
        left = final(FOUR, [0, 3], [1, 0], sampler=sampler, penalty_window=1, no_repeat_ngram_size=2)
        assert left[3] == -torch.inf and torch.equal(left[:3], FOUR[:3])


# Leaving a stage out

ALL = dict(temperature=1.4, top_k=4, top_p=0.85, min_p=0.15, repetition_penalty=1.4, presence_penalty=0.3,
           frequency_penalty=0.2, no_repeat_ngram_size=2)  # fmt: skip
OFF = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("sampler", PRESETS)
@pytest.mark.parametrize("stage", STAGES)
def test_without_a_stage_everything_is_as_if_that_one_were_off(sampler, stage):
    """Leaving a stage out takes away its effect and no other's."""
    whole = SamplingParams(**ALL, sampler=sampler, seed=1)
    left_out = SamplingParams(**ALL, sampler=sampler, seed=1, without=(stage,))
    off = SamplingParams(**{**ALL, stage: getattr(OFF, stage)}, sampler=sampler, seed=1)
    assert left_out.chain() == off.chain() == tuple(name for name in whole.chain() if name != stage)
    seen = False
    for seed in range(40):
        logits = torch.randn(9, generator=torch.Generator().manual_seed(seed)) * 2
        found, expected, all_on = (
            Sampler(each).choose(logits, [0, 1, 2, 0], [3, 3, 0]) for each in (left_out, off, whole)
        )
        assert torch.equal(found.final, expected.final) and found.token_id == expected.token_id
        seen = seen or not torch.equal(found.final, all_on.final)
    assert seen


def test_without_all_stages_only_the_draw_is_left():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(**ALL, seed=9, without=STAGES)
    assert params.chain() == () and not params.is_greedy
    choice = Sampler(params).choose(logits, [0, 1], [0])
    plain = Sampler(SamplingParams(temperature=1.0, seed=9)).choose(logits, [], [])
    assert choice.drawn and choice.token_id == plain.token_id and choice.final is choice.raw


def test_a_greedy_choice_stays_greedy_without_temperature():
    params = SamplingParams(repetition_penalty=1.5, without=("temperature", "top_k"))
    assert params.is_greedy and params.chain() == ("repetition_penalty",)
