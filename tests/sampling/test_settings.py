"""Sampling settings: where each value comes from, what is said about it, what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from decodescope.errors import InputError
from decodescope.locale import set_language
from decodescope.sampling.checkpoint import read_checkpoint_settings
from decodescope.sampling.orders import PRESETS, STAGES
from decodescope.sampling.params import SamplingParams, resolve

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
QWEN = json.loads((CONFIGS / "qwen2.5-7b-instruct.generation_config.json").read_text())


def fault(**values: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        resolve(values)
    for language in ("en", "zh"):
        set_language(language)
        assert "{" not in str(caught.value) and "\n" not in str(caught.value)
    set_language("en")
    return caught.value


def test_nothing_given_is_greedy_and_nothing_else():
    params = resolve({})
    assert params.is_greedy and params.chain() == () and params.notes == ()
    assert params.values() == SamplingParams().values()
    assert {params.origin(name) for name in params.values()} == {"default"}


def test_a_value_of_none_counts_as_not_given():
    assert resolve(dict.fromkeys(SamplingParams().values())) == resolve({})


@pytest.mark.parametrize("filter_", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_filter_without_a_temperature_means_temperature_1(filter_):
    params = resolve(filter_)
    assert params.temperature == 1.0 and not params.is_greedy
    assert params.chain() == tuple(filter_)  # temperature 1 is no stage
    assert params.notes == ("note.filter_temperature",)
    assert params.origin("temperature") == "default" and params.origin(next(iter(filter_))) == "command line"


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}])
def test_a_filter_that_is_switched_off_changes_nothing(off):
    params = resolve(off)
    assert params.is_greedy and params.notes == ()


def test_a_seed_alone_stays_greedy_and_says_so():
    params = resolve({"seed": 7})
    assert params.is_greedy and params.seed == 7 and params.notes == ("note.seed_greedy",)


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_temperature_0_is_greedy_says_so_and_switches_the_drawing_filters_off(zero):
    params = resolve({"temperature": zero, "top_k": 5, "repetition_penalty": 1.2})
    assert params.is_greedy and params.chain() == ("repetition_penalty",)
    assert params.notes == ("note.temperature_zero", "note.filter_greedy")


def test_penalties_leave_the_choice_greedy():
    params = resolve(
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3}
    )
    assert params.is_greedy and params.notes == () and len(params.chain()) == 4


def test_the_checkpoints_own_settings_are_taken_with_their_origin():
    params = resolve({}, QWEN)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.7, 20, 0.8, 1.05)
    assert params.chain() == ("repetition_penalty", "temperature", "top_k", "top_p")
    for name in params.values():
        expected = "checkpoint" if name in ("temperature", "top_k", "top_p", "repetition_penalty") else "default"
        assert params.origin(name) == expected, name
    assert params.notes == ()


def test_the_command_line_comes_before_the_checkpoint():
    params = resolve({"temperature": 0.2, "top_k": 0}, QWEN)
    assert (params.temperature, params.top_k, params.top_p) == (0.2, 0, 0.8)
    assert (params.origin("temperature"), params.origin("top_p")) == ("command line", "checkpoint")
    greedy = resolve({"temperature": 0}, QWEN)
    assert greedy.is_greedy and greedy.chain() == ("repetition_penalty",)
    assert "note.temperature_zero" in greedy.notes


@pytest.mark.parametrize("without", [{"do_sample": False}, {"do_sample": None}])
def test_a_checkpoint_that_does_not_sample_keeps_only_its_penalties(without):
    params = resolve({}, {**QWEN, **without})
    assert params.is_greedy and params.chain() == ("repetition_penalty",)
    assert params.origin("temperature") == "default"


def test_a_checkpoint_that_samples_without_saying_how_hot_draws_at_1():
    params = resolve({}, {"do_sample": True})
    assert params.temperature == 1.0 and params.chain() == () and params.origin("temperature") == "checkpoint"


def test_a_checkpoint_without_settings_says_so():
    for silent in ({}, {"eos_token_id": 3, "temperature": None}):
        assert resolve({}, silent).notes == ("note.no_checkpoint_settings",)
    assert resolve({}, None).notes == ()


def test_a_checkpoints_seed_is_not_a_setting():
    assert resolve({}, {**QWEN, "seed": 5}).seed is None


def test_an_impossible_value_in_the_checkpoint_is_refused_by_name():
    with pytest.raises(InputError) as caught:
        resolve({}, {**QWEN, "top_k": "many"})
    assert caught.value.key == "sampling.checkpoint"
    assert "top_k" in str(caught.value) and "many" in str(caught.value)


BAD = [
    ("temperature", -1, "sampling.temperature"), ("temperature", -1e-9, "sampling.temperature"),
    ("temperature", 100.1, "sampling.temperature"), ("temperature", 10**400, "sampling.temperature"),
    ("temperature", float("nan"), "sampling.not_a_number"), ("temperature", float("inf"), "sampling.not_a_number"),
    ("temperature", "0.7", "sampling.not_a_number"), ("temperature", True, "sampling.not_a_number"),
    ("top_p", 0, "sampling.top_p"), ("top_p", 0.0, "sampling.top_p"), ("top_p", 1.5, "sampling.top_p"),
    ("top_p", -0.1, "sampling.top_p"), ("top_p", False, "sampling.not_a_number"), ("top_p", [], "sampling.not_a_number"),
    ("top_k", -1, "sampling.top_k"), ("top_k", 5.0, "sampling.not_whole"), ("top_k", True, "sampling.not_whole"),
    ("top_k", "5", "sampling.not_whole"), ("min_p", -0.1, "sampling.min_p"), ("min_p", 1.1, "sampling.min_p"),
    ("repetition_penalty", 0, "sampling.repetition_penalty"), ("repetition_penalty", -1.0, "sampling.repetition_penalty"),
    ("repetition_penalty", 101, "sampling.repetition_penalty"), ("presence_penalty", 101, "sampling.presence_penalty"),
    ("frequency_penalty", -101, "sampling.frequency_penalty"), ("no_repeat_ngram_size", -2, "sampling.no_repeat_ngram_size"),
    ("no_repeat_ngram_size", 2.0, "sampling.not_whole"), ("seed", -1, "sampling.seed"), ("seed", 1 << 63, "sampling.seed"),
    ("seed", 1.0, "sampling.not_whole"), ("seed", True, "sampling.not_whole"),
    ("sampler", "greedy", "sampling.sampler"), ("sampler", "", "sampling.sampler"), ("sampler", ["hf"], "sampling.sampler"),
    ("without", "top_q", "sampling.without"), ("without", ("top_k", "seed"), "sampling.without"),
    ("without", 3, "sampling.without"), ("without", [["top_k"]], "sampling.without"),
    ("penalty_window", -1, "sampling.penalty_window"), ("penalty_window", 1 << 31, "sampling.penalty_window"),
    ("penalty_window", 2.0, "sampling.not_whole"), ("penalty_window", "64", "sampling.not_whole"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "key"), BAD, ids=lambda value: str(value)[:24])
def test_a_bad_value_has_its_own_sentence(name, value, key):
    assert fault(**{name: value}).key == key


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 100), ("temperature", 1e-30), ("top_p", 1), ("top_p", 1e-9), ("top_k", 2**31 - 1), ("min_p", 1), ("min_p", 0),
     ("penalty_window", 0), ("penalty_window", 2**31 - 1), ("sampler", "vllm"), ("repetition_penalty", 1e-3), ("presence_penalty", -100), ("no_repeat_ngram_size", 1), ("seed", (1 << 63) - 1), ("seed", 0)],
)  # fmt: skip
def test_the_edges_of_each_range_are_inside(name, value):
    assert resolve({name: value}).values()[name] == value


def test_unknown_samplers_and_stages_are_refused_and_the_known_ones_are_named():
    assert all(name in str(fault(sampler="greedy")) for name in ("greedy", *PRESETS))
    assert all(name in str(fault(without="top_k,top_q")) for name in ("top_q", *STAGES))


def test_an_unknown_setting_is_refused_and_the_known_ones_are_named():
    error = fault(top_q=3)
    assert error.key == "sampling.unknown" and "top_q" in str(error) and "top_p" in str(error)


@pytest.mark.parametrize("sampler", PRESETS)
def test_the_chain_has_the_order_of_its_sampler(sampler):
    params = SamplingParams(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.1, sampler=sampler)
    on = {"temperature", "top_k", "min_p", "repetition_penalty"}
    assert params.chain() == tuple(name for name in PRESETS[sampler].order if name in on)


def test_the_window_is_the_samplers_own_unless_one_is_given():
    for sampler, own in (("hf", 0), ("vllm", 0), ("llamacpp", 64)):
        assert (
            SamplingParams(sampler=sampler).window
            == own
            == resolve({"sampler": sampler}).values()["penalty_window"]
        )
        assert SamplingParams(sampler=sampler, penalty_window=7).window == 7
    assert SamplingParams(sampler="llamacpp", penalty_window=0).window == 0


@pytest.mark.parametrize(
    "given",
    ["top_p,temperature", " top_p , temperature", ["top_p", "temperature"], ("temperature", "top_p")],
    ids=str,
)
def test_the_stages_left_out_are_given_as_names_or_joined_by_commas(given):
    params = resolve({"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "without": given})
    assert params.chain() == ("min_p",) and params.origin("without") == "command line"
    assert params.values()["without"] == "temperature,top_p"


@pytest.mark.parametrize("nothing", ["", ",", (), []], ids=repr)
def test_nothing_left_out_is_nothing(nothing):
    assert resolve({"without": nothing}).values()["without"] is None


def test_the_values_are_json_scalars_and_make_the_same_settings_again():
    for given in (
        {},
        {"temperature": 0.5, "sampler": "llamacpp", "without": "top_k,min_p", "top_k": 4, "seed": 3},
        {"sampler": "vllm", "penalty_window": 12, "presence_penalty": 0.5},
    ):
        params = resolve(given)
        assert json.loads(json.dumps(params.values())) == params.values()
        again = resolve(params.values())
        assert (again.chain(), again.window, again.values()) == (params.chain(), params.window, params.values())


def test_one_value_of_settings_in_force_can_be_replaced():
    params = resolve({"sampler": "llamacpp", "without": "top_k", "repetition_penalty": 1.1, "top_p": 0.9}, QWEN)
    hotter = dataclasses.replace(params, temperature=1.25)
    assert hotter.values() == {**params.values(), "temperature": 1.25} and hotter.origins == params.origins
    assert dataclasses.replace(hotter, temperature=0.0).chain() == ("repetition_penalty",)
    with pytest.raises(InputError) as caught:
        dataclasses.replace(params, temperature=101)
    assert caught.value.key == "sampling.temperature"


def test_a_checkpoint_cannot_choose_the_sampler():
    asked = {**QWEN, "sampler": "vllm", "without": "top_k", "penalty_window": 3}
    assert resolve({}, asked).values() == resolve({}, QWEN).values()


# The file


def test_the_published_file_is_read(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    assert read_checkpoint_settings(tmp_path) == QWEN


def test_no_file_means_no_settings(tmp_path):
    assert read_checkpoint_settings(tmp_path) == {}
    assert read_checkpoint_settings(tmp_path / "model.gguf") == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"null", b"9" * 5000])
def test_a_file_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_checkpoint_settings(tmp_path)
    assert caught.value.key == "config.not_json" and "generation_config.json" in str(caught.value)


def test_what_a_checkpoint_asks_for_and_does_not_get_is_told():
    asked = {"do_sample": True, "typical_p": 0.5, "num_beams": 4, "epsilon_cutoff": 0.0, "top_h": None}
    assert resolve({}, asked).notes == ("note.checkpoint_ignored:num_beams, typical_p",)


def test_a_bad_value_of_the_checkpoint_names_its_file():
    with pytest.raises(InputError, match=r"generation_config\.json.*temperature"):
        resolve({}, {"do_sample": True, "temperature": "hot"})
