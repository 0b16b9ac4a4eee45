"""The grid: every combination and every seed, each once; presets as they are; what cannot be is one sentence."""

import pytest

from decodescope.errors import InputError
from decodescope.experiments.sample_grid import MOST_ROWS, parse_grid, settle
from decodescope.sampling.params import SamplingParams

CHECKPOINT = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}


def rows(*grid: str, seeds: str | None = None, checkpoint: dict | None = None, from_checkpoint: bool = False):
    return settle(parse_grid(grid, seeds), checkpoint or {}, from_checkpoint)


def test_every_combination_is_a_row_for_every_seed_in_the_order_given():
    found = rows("temperature=0.3,0.7", "top_p=0.9,0.5", seeds="42,7,1")
    expected = [(t, p, seed) for t in (0.3, 0.7) for p in (0.9, 0.5) for seed in (42, 7, 1)]
    assert [(r.params.temperature, r.params.top_p, r.params.seed) for r in found] == expected
    assert found[0].name == "temperature=0.3 top_p=0.9"


def test_a_row_that_draws_nothing_stands_there_once():
    found = rows("temperature=0,0.7", seeds="1,2")
    assert [(r.params.temperature, r.params.seed) for r in found] == [(0, None), (0.7, 1), (0.7, 2)]


def test_values_and_seeds_that_come_twice_count_once():
    found = rows("temperature=0.7,0.7", "temperature=1.0,0.7", seeds="3,3")
    assert [(r.params.temperature, r.params.seed) for r in found] == [(0.7, 3), (1.0, 3)]


def test_without_seeds_all_rows_draw_the_same_random_numbers():
    assert {r.params.seed for r in rows("temperature=0.3,0.7,1.5")} == {0}


def test_a_filter_alone_means_temperature_one():
    (row,) = rows("top-k=5")
    assert (row.params.temperature, row.params.top_k) == (1.0, 5)


def test_every_sampling_setting_is_a_knob():
    knobs = ("sampler=vllm", "without=none,top_p,top_k+top_p", "penalty_window=3", "temperature=0.5", "top_k=4")
    found = rows(*knobs, "top_p=0.9", "min_p=0.1", "repetition_penalty=1.2", "presence_penalty=-1",
                 "frequency_penalty=0.5", "no_repeat_ngram_size=3")  # fmt: skip
    assert [r.params.without for r in found] == [(), ("top_p",), ("top_k", "top_p")]
    params = found[0].params
    assert (params.sampler, params.window, params.top_k, params.min_p) == ("vllm", 3, 4, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.no_repeat_ngram_size) == (-1, 0.5, 3)


def test_presets_are_whole_settings_before_the_combinations():
    found = rows("temperature=0.5", "preset=greedy,checkpoint,checkpoint-greedy", seeds="8", checkpoint=CHECKPOINT)
    assert [r.name for r in found] == ["greedy", "checkpoint", "checkpoint-greedy", "temperature=0.5"]
    greedy, drawn, penalised, _ = (r.params for r in found)
    assert greedy.values() == SamplingParams().values()
    assert (drawn.temperature, drawn.top_k, drawn.repetition_penalty, drawn.seed) == (0.7, 20, 1.1, 8)
    assert (penalised.temperature, penalised.chain(), penalised.seed) == (0.0, ("repetition_penalty",), None)


def test_a_checkpoint_without_settings_says_so():
    (row,) = rows("preset=checkpoint")
    assert row.params.notes == ("note.no_checkpoint_settings",)


def test_the_grid_may_start_from_the_checkpoint():
    found = rows("repetition_penalty=1.0,1.3", checkpoint=CHECKPOINT, from_checkpoint=True)
    assert [(r.params.top_k, r.params.repetition_penalty) for r in found] == [(20, 1.0), (20, 1.3)]


@pytest.mark.parametrize(
    ("grid", "seeds", "word"),
    [
        ((), None, "nothing to compare"),
        (("",), None, "nothing to compare"),
        (("colour=red",), None, "colour"),
        (("seed=1",), None, "--seeds"),
        (("temperature",), None, "lacks a value"),
        (("temperature=",), None, "lacks a value"),
        (("temperature=0.3,,0.7",), None, "lacks a value"),
        (("temperature=warm",), None, "warm"),
        (("temperature=nan",), None, "number"),
        (("temperature=1e999",), None, "number"),
        (("temperature=-1",), None, "Temperature"),
        (("top_k=2.5",), None, "whole number"),
        (("top_k=" + "9" * 5000,), None, "top_k"),
        (("top_p=0",), None, "top-p"),
        (("sampler=magic",), None, "magic"),
        (("without=luck",), None, "luck"),
        (("preset=best",), None, "best"),
        (("temperature=0.7",), "-1", "seed"),
        (("temperature=0.7",), "1,x", "1,x"),
        (("temperature=0.7",), "", "--seeds"),
        (("temperature=0.7",), str(1 << 63), "seed"),
        (("temperature=0.7",), ",".join(map(str, range(MOST_ROWS + 1))), str(MOST_ROWS)),
        ((f"top_k={','.join(map(str, range(99)))}", f"min_p={','.join(f'0.{i:02}' for i in range(99))}"), None, "9801"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(grid, seeds, word):
    with pytest.raises(InputError) as fault:
        parse_grid(grid, seeds)
    assert word in str(fault.value) and "\n" not in str(fault.value)
