"""What a bench computes: operations by formula, what a step reads, rates, shares and ratios of rounds."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decodescope.errors import InputError
from decodescope.experiments.bench.figures import expected_bytes, prefill_flops
from decodescope.experiments.bench.messages import Contender, DecodeTask, Opened, PrefillTask, Timed, tuples
from decodescope.experiments.bench.ours import step_bytes
from decodescope.experiments.bench.plan import AXES, DEFAULT, FULL, QUICK, Case, Cases, settle
from decodescope.experiments.bench.series import Series, decode_row, prefill_row
from decodescope.experiments.peers.known import PEERS, parse_peers
from decodescope.model.checkpoint import load_model
from decodescope.model.mask import build_masks

OURS = Contender()


def test_a_prompt_of_one_token_takes_the_products_that_torch_counts_and_attention_to_itself(pair):
    ours, _ = pair
    with FlopCounterMode(display=False) as counter:
        ours(torch.tensor([[1]]))
    products = sum(
        count for op, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)
    )
    config = ours.config
    itself = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert products > 0 and prefill_flops(config, 1) == products + itself


@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
def test_longer_prompts_add_what_every_token_takes_and_the_pairs_that_the_masks_show(pair, tokens):
    config = pair[0].config
    masks = build_masks(config, tokens, 0, None, torch.device("cpu"))
    visible = [torch.ones(tokens, tokens).tril() if mask.visible is None else mask.visible for mask in masks]
    pairs = sum(int(each.sum()) for each in visible)
    of_a_pair = 4 * config.num_attention_heads * config.head_dim
    one, layers = prefill_flops(config, 1), config.num_hidden_layers
    head = 2 * config.vocab_size * config.hidden_size
    weights = one - head - of_a_pair * layers
    assert prefill_flops(config, tokens) == weights * tokens + head + of_a_pair * pairs


def test_a_step_reads_everything_that_is_held_but_an_embedding_that_is_no_head(family, tiny_folders):
    model, _ = load_model(tiny_folders[family.name])
    sizes = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    embedding = 0 if model.config.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    assert step_bytes(model) == sum(sizes.values()) - embedding


def timed(tokens_per_s: float, tokens: int = 10, **more) -> Timed:
    return Timed(tokens / tokens_per_s, tokens, **more)


def series(case: Case, rates: list[float], limits: list[float], **more) -> Series:
    made = Series(case, new_tokens=10)
    for rate, limit in zip(rates, limits, strict=True):
        made.add(
            timed(rate, len(case.task.prompts) * 10 if isinstance(case.task, DecodeTask) else 10, **more), limit
        )
    return made


def decoding(rows: int = 1, context: int = 4, **more) -> Case:
    return Case("batch", OURS, DecodeTask(tuple((7,) * context for _ in range(rows)), 10, **more))


def test_a_row_tells_median_least_and_most_of_its_rounds():
    case = decoding()
    row = decode_row(series(case, [5, 9, 6], [1e3] * 3), series(case, [1], [1]), Opened("1"))
    assert row.tokens_per_s == pytest.approx(6)
    assert (row.tokens_per_s_min, row.tokens_per_s_max, row.rounds) == (pytest.approx(5), pytest.approx(9), 3)


def test_ratios_are_taken_round_by_round_so_that_a_slow_round_slows_both():
    first, other = series(decoding(), [10, 1, 10], [1] * 3), series(decoding(), [20, 2, 5], [1] * 3)
    assert decode_row(other, first, Opened("1")).ratio == pytest.approx(2)


def test_the_limit_of_decoding_is_weights_and_cached_positions_at_the_reading_speed():
    case = decoding(rows=2, context=4)
    one = series(case, [10.0], [4000.0], position_bytes=5)
    row = decode_row(one, one, Opened("1", step_bytes=900))
    cached = (4 + 1 + 5) * 5  # positions at half way, of each row
    assert row.cache_bytes == 2 * cached and row.step_bytes == 900 + 2 * cached
    assert row.limit_tokens_per_s == pytest.approx(2 * 4000 / row.step_bytes)
    assert row.limit_share == pytest.approx(10 / row.limit_tokens_per_s)


def test_what_an_engine_does_not_tell_is_not_guessed():
    one = series(decoding(), [10.0], [4000.0])
    row = decode_row(one, one, Opened("1"))
    assert (
        row.step_bytes is row.cache_bytes is row.limit_share is row.limit_tokens_per_s is row.same_tokens is None
    )


def test_the_limit_of_prefill_is_its_operations_at_the_fastest_product(pair):
    config = pair[0].config
    case = Case("prefill", OURS, PrefillTask((1, 2, 3)))
    made = Series(case)
    made.add(Timed(0.5, 3), 1e6)
    row = prefill_row(made, made, Opened("1"), config)
    assert row.flops == prefill_flops(config, 3) and row.tokens_per_s == pytest.approx(6)
    assert row.limit_share == pytest.approx(row.flops / 0.5 / 1e6)


def test_tokens_are_compared_only_behind_the_same_prompt():
    one = series(decoding(), [1], [1], ids=(1, 2, 3, 4))
    other = series(decoding(), [1], [1], ids=(1, 2, 9, 4))
    longer = series(decoding(context=5), [1], [1], ids=(1, 2, 9, 4))
    assert decode_row(other, one, Opened("1")).same_tokens == 2
    assert decode_row(longer, one, Opened("1")).same_tokens is None


def test_a_trial_decides_how_many_tokens_are_timed_within_bounds():
    found = []
    for rate in (1e-9, 20, 1e9):
        one = Series(decoding())
        one.choose_length(Timed(1 / rate, 1), rows=1, measure_s=1, most=32)
        found.append(one.new_tokens)
    assert found == [8, 20, 32]


def cases(most: int = 512, compiled: bool = True, **changes) -> Cases:
    return Cases(settle(QUICK, changes), OURS, tuple(range(100, 200)), most, compiled)


def test_contexts_and_prompts_end_where_the_models_context_does():
    made = cases(most=64, contexts=(8, 4096, 8192), prefills=(16, 512), new_tokens=16)
    assert [each.task.context for each in made.of("context")] == [8, 47]
    assert [len(each.task.prompt) for each in made.of("prefill")] == [16, 63]


def test_long_contexts_are_filled_and_short_ones_read():
    short, long = cases(contexts=(32, 200)).of("context")
    assert (short.task.filled, long.task.filled) == (0, 199) and len(long.task.prompts[0]) == 1


def test_every_row_of_a_batch_has_a_prompt_of_its_own():
    (case,) = cases(batches=(4,)).of("batch")
    assert len(set(case.task.prompts)) == 4 and len({len(prompt) for prompt in case.task.prompts}) == 1


def test_no_round_reads_a_prompt_that_begins_as_in_the_round_before():
    (case,) = cases(prefills=(16,)).of("prefill")
    prompts = [case.turned(turn, 1).prompt for turn in range(4)]
    assert len({prompt[0] for prompt in prompts}) == 4
    assert len({prompt[1:] for prompt in prompts}) == 1


def test_an_axis_with_nothing_to_compare_has_no_cases():
    made = cases(formats=("stored",), compiled=False)
    assert made.of("format") == made.of("kernels") == made.of("against") == made.of("load") == []


def test_against_others_ours_comes_first_and_records():
    made = cases(peers=parse_peers("transformers,llamacpp")).of("against")
    decode = [each for each in made if isinstance(each.task, DecodeTask)]
    assert [(each.contender.engine, each.contender.format, each.task.recording) for each in decode] == [
        ("decodescope", "stored", True),
        ("transformers", "bfloat16", False),
        ("transformers", "float16", False),
        ("llamacpp", "stored", False),
    ]
    assert len({each.task.prompts for each in decode}) == 1


def test_only_what_was_asked_for_differs_from_a_size():
    assert settle(DEFAULT, {"rounds": None, "contexts": None}) == DEFAULT
    assert settle(DEFAULT, {"contexts": (5,)}) == replace(DEFAULT, contexts=(5,))
    assert settle(DEFAULT, {"rounds": 2}) == replace(DEFAULT, rounds=2, axis_s=float("inf"))
    assert set(QUICK.axes) < set(DEFAULT.axes) == set(FULL.axes) == set(AXES)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"contexts": (0,)}, "bench.number"),
        ({"batches": (1, -1)}, "bench.number"),
        ({"prefills": (1 << 40,)}, "bench.number"),
        ({"rounds": 0}, "bench.number"),
        ({"new_tokens": 0}, "bench.number"),
        ({"axes": ("speed",)}, "bench.unknown_name"),
        ({"formats": ("int3",)}, "bench.unknown_name"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change, key):
    with pytest.raises(InputError) as fault:
        settle(QUICK, change)
    assert fault.value.key == key


def test_engines_are_named_once_and_unknown_ones_refused():
    assert [peer.name for peer in parse_peers("openvino, llamacpp,openvino")] == ["openvino", "llamacpp"]
    with pytest.raises(InputError, match="vllm"):
        parse_peers("llamacpp,vllm")
    assert all(peer.contenders for peer in PEERS.values())


def test_what_a_contender_may_take_grows_with_the_bits_of_its_weights(pair):
    config = pair[0].config
    sizes = [
        expected_bytes(Contender(format=name), config, 1) for name in ("nf4", "int4", "int8", "float16", "float32")
    ]
    assert sizes == sorted(set(sizes))
    assert expected_bytes(OURS, config, 123) == 123


def test_lists_come_back_from_json_as_tuples():
    assert tuples({"a": [1, [2, {"b": [3]}]], "c": "d"}) == {"a": (1, (2, {"b": (3,)})), "c": "d"}
