"""config.json: the true numbers of real models, and a sentence for everything that would silently change the maths."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodescope.errors import InputError
from decodescope.locale import set_language
from decodescope.model.config import ModelConfig, parse_config, read_config
from decodescope.model.cost import count_parameters, kv_bytes_per_token, weight_bytes
from families import BY_NAME, Family

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
KEYS = json.loads((CONFIGS / "qwen2.5-7b-instruct.config.json").read_text())
MISTRAL = {
    **{name: KEYS[name] for name in KEYS if "window" not in name}, "architectures": ["MistralForCausalLM"],
    "model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 4096,
}  # fmt: skip
LLAMA = {**{name: KEYS[name] for name in KEYS if "window" not in name}, "architectures": ["LlamaForCausalLM"]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def fault(keys: dict[str, Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_config(keys)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return caught.value


# What real models are


@pytest.mark.parametrize(
    ("name", "total", "non_embedding", "bfloat16_bytes", "tensors", "kv_bytes"),
    [
        ("qwen2.5-7b-instruct", 7_615_616_512, 6_525_621_760, 15_231_233_024, 339, 57_344),
        ("qwen2.5-0.5b-instruct", 494_032_768, 357_898_112, 988_065_536, 290, 12_288),
    ],
)
def test_the_published_sizes_of_qwen_2_5(name, total, non_embedding, bfloat16_bytes, tensors, kv_bytes):
    config = read_config(CONFIGS / f"{name}.config.json")
    parameters = count_parameters(config)
    assert (parameters.total, parameters.non_embedding) == (total, non_embedding)
    assert weight_bytes(config)["bfloat16"] == bfloat16_bytes
    assert len(list(config.tensor_shapes())) == tensors
    assert kv_bytes_per_token(config, 2) == kv_bytes


def test_the_keys_of_qwen_2_5_7b():
    config = parse_config(KEYS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (28, 4, 128)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert (config.rope.kind, config.rope.theta, config.rms_norm_eps) == ("default", 1e6, 1e-6)
    assert not config.tie_word_embeddings
    assert config.windows == ()  # sliding_window is there, use_sliding_window is false
    shapes = dict(config.tensor_shapes())
    assert shapes["model.layers.27.self_attn.k_proj.weight"] == (512, 3584)
    assert shapes["lm_head.weight"] == (152064, 3584)


def test_every_family_of_transformers_own_config_gives_its_numbers(family: Family):
    theirs = family.config()
    keys = json.loads(theirs.to_json_string(use_diff=False))
    ours = parse_config({**keys, "architectures": [f"{family.architecture}ForCausalLM"]})
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 32 // 4)
    assert ours.qk_norm == (family.architecture == "Qwen3")
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert ours.rope.factor == rope.get("factor", 1.0)
    parameters = sum(p.numel() for p in family.reference().parameters())
    assert count_parameters(ours).total == parameters


def test_windows_are_those_of_each_layer():
    of = {name: parse_config({**json.loads(BY_NAME[name].config().to_json_string(use_diff=False)), "architectures": None})
          for name in ("qwen2-window", "mistral-window", "mistral-gqa", "qwen2-gqa", "llama-gqa")}  # fmt: skip
    assert [of["qwen2-window"].window(i) for i in range(3)] == [None, 5, 5]
    assert [of["mistral-window"].window(i) for i in range(3)] == [6, 6, 6]
    for name in ("mistral-gqa", "qwen2-gqa", "llama-gqa"):
        assert [of[name].window(i) for i in range(3)] == [None] * 3


def test_where_the_file_is_silent_the_familys_default_holds():
    silent = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert parse_config(silent).windows == (4096,) * 4
    assert parse_config({**MISTRAL, "sliding_window": None}).windows == ()
    small = {name: value for name, value in KEYS.items() if name != "max_window_layers"}
    config = parse_config({**small, "num_hidden_layers": 30, "use_sliding_window": True})
    assert config.windows == (None,) * 28 + (131072,) * 2
    without = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
    assert parse_config(without).num_key_value_heads == 28
    assert parse_config(without).rms_norm_eps == 1e-6
    assert parse_config({**KEYS, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_layer_types_decide_where_they_are_given():
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    keys = {**KEYS, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9, "layer_types": kinds}
    assert parse_config(keys).windows == (None, 9, None, 9)
    assert parse_config({**keys, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}).windows == ()


# What would change the maths is refused by name

REFUSED = {
    "hidden_act": "gelu",
    "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
    "query_pre_attn_scalar": 256,
    "num_experts": 64,
    "num_local_experts": 8,
    "use_qk_norm": True,
    "clip_qkv": 8.0,
    "original_max_position_embeddings": 4096,
    "something_new": "on",
    "layer_types": ["linear_attention"] * 28,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_may_change_the_maths_is_refused_by_name(name):
    error = fault({**KEYS, name: REFUSED[name]})
    assert error.key == "config.unsupported"
    assert name in str(error)


@pytest.mark.parametrize("kinds", ["full", 5, ["full_attention"] * 27, [[]] * 28, ["sliding_attention"] * 28])
def test_layer_types_that_do_not_fit_are_refused(kinds):
    assert fault({**KEYS, "layer_types": kinds}).key == "config.unsupported"


# As they stand in published checkpoints.
QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_checkpoint_is_refused_by_its_method_and_with_the_way_to_do_it(method, language):
    set_language(language)
    error = fault({**KEYS, "quantization_config": QUANTISED[method]})
    assert error.key == "config.quantized"
    assert method in str(error) and "--quantize int8" in str(error) and "GGUF" in str(error)


@pytest.mark.parametrize(
    ("keys", "named"),
    [({"compression_config": QUANTISED["compressed-tensors"]}, "compressed-tensors"),
     ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}, "bitsandbytes"),
     ({"quantization_config": {"quant_method": "a" * 500}}, "aaa..."), ({"quantization_config": {"bits": 3}}, "3"),
     ({"quantization_config": "gptq"}, "gptq"), ({"quantization_config": ["awq"]}, "awq"), ({"quantization_config": 4}, "4")],
    ids=str,
)  # fmt: skip
def test_other_ways_of_saying_that_a_checkpoint_is_quantised_are_understood(keys, named):
    error = fault({**KEYS, **keys})
    assert error.key == "config.quantized" and named in str(error)


@pytest.mark.parametrize("nothing", [None, {}, False])
def test_a_checkpoint_that_says_it_is_not_quantised_is_taken(nothing):
    assert parse_config({**KEYS, "quantization_config": nothing}) == parse_config(KEYS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", 5, [], {}])
def test_a_rotary_kind_that_is_not_implemented_is_refused(kind):
    assert fault({**KEYS, "rope_scaling": {"rope_type": kind, "factor": 2.0}}).key == "config.rope"


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}, {"rope_type": "llama3", **YARN, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
     {"rope_type": "yarn", **YARN, "truncate": "no"}, {"rope_type": "yarn", **YARN, "beta_fast": 0},
     {"rope_type": "linear", "factor": True}, {"rope_type": "linear", "factor": "2"}, {"rope_type": "linear", "factor": -2.0},
     {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "linear", "factor": 10**400},
     {"full_attention": {"rope_type": "default"}}, "linear", 4, ["yarn"]],
    ids=str,
)  # fmt: skip
def test_a_rotary_setting_that_is_impossible_is_refused(scaling):
    assert fault({**KEYS, "rope_scaling": scaling}).key == "config.rope"


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_rotary_setting_that_is_missing_is_named(missing):
    full = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    error = fault({**LLAMA, "rope_scaling": {"rope_type": "llama3", **{k: full[k] for k in full if k != missing}}})
    assert error.key == "config.missing_key" and missing in str(error)


@pytest.mark.parametrize(
    "theta", [0, 1, 0.5, -1e6, float("inf"), float("nan"), "1e6", True, None, 10**30, 10**400]
)
def test_an_impossible_rotary_base_is_refused(theta):
    assert fault({**KEYS, "rope_theta": theta}).key == "config.rope"


def test_the_three_spellings_of_the_rotary_settings_agree():
    plain = {name: value for name, value in KEYS.items() if name != "rope_theta"}
    old = parse_config({**plain, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}})
    newer = parse_config({**plain, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "x", **YARN}})
    newest = parse_config({**plain, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}})
    assert old == newer == newest
    assert (old.rope.kind, old.rope.theta, old.rope.factor) == ("yarn", 5e5, 4.0)


def test_the_context_stands_in_for_a_missing_original_length():
    config = parse_config({**KEYS, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.rope.original_max_position_embeddings == 32768


# What is harmless passes

HARMLESS = {
    "transformers_version": "4.43.1", "torch_dtype": "bfloat16", "_name_or_path": "x", "_attn_implementation": "sdpa",
    "pretraining_tp": 1, "id2label": {"0": "a"}, "use_cache": False, "eos_token_id": [1, 2], "bos_token_id": None,
    "attention_dropout": 0.1, "hidden_act": "swish", "partial_rotary_factor": 1.0, "rope_scaling": None,
    "quantization_config": None, "logit_scale": None, "num_experts": 0, "clip_qkv": False, "new_list": [], "new_text": "",
    "new_map": {}, "head_dim": None, "num_key_value_heads": None, "attention_bias": None, "tie_word_embeddings": None,
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_or_empty_key_passes(name):
    assert parse_config({**KEYS, name: HARMLESS[name]}).hidden_size == 3584


# Impossible values

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
ABSURD = [0, -1, True, 1.5, 28.0, "28", [28], {}, 10**30, 10**400, float("nan"), float("inf"), (1 << 24) + 1]


@pytest.mark.parametrize("value", ABSURD, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("name", SIZES)
def test_an_impossible_size_is_refused_by_name(name, value):
    error = fault({**KEYS, name: value})
    assert error.key == "config.size"
    assert name in str(error)


@pytest.mark.parametrize("value", [0, 1, 1.0, -1e-6, True, "1e-6", None, float("nan"), float("inf"), 10**400])
def test_an_impossible_epsilon_is_refused(value):
    assert fault({**KEYS, "rms_norm_eps": value}).key == "config.size"


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
@pytest.mark.parametrize("value", ["false", 0, 1, "", [], 0.0])
def test_a_switch_that_is_not_true_or_false_is_refused(name, value):
    error = fault({**KEYS, name: value})
    assert error.key == "config.size" and name in str(error)


@pytest.mark.parametrize("window", [0, -5, "4096", 4096.0, True, 10**30 * 1.0])
def test_an_impossible_window_is_refused(window):
    assert fault({**MISTRAL, "sliding_window": window}).key == "config.size"


@pytest.mark.parametrize("name", SIZES[:5])
def test_a_missing_size_is_named(name):
    error = fault({key: value for key, value in KEYS.items() if key != name})
    assert error.key == "config.missing_key" and name in str(error)


def test_heads_that_cannot_be_grouped_or_rotated_are_refused():
    assert fault({**KEYS, "num_key_value_heads": 5}).key == "config.groups"
    assert fault({**KEYS, "head_dim": 127}).key == "config.head_dim"


@pytest.mark.parametrize("layers", [4097, 16_000_000])
def test_millions_of_layers_are_refused_before_anything_is_made_of_them(layers):
    assert fault({**MISTRAL, "num_hidden_layers": layers}).key == "config.size"


ARCHITECTURES = (["GPT2LMHeadModel"], [None], [["Qwen2ForCausalLM"]], [5], "Qwen2ForCausalLM2", {}, ["x" * 10_000])


@pytest.mark.parametrize("architectures", ARCHITECTURES, ids=lambda v: str(v)[:24])
def test_an_unknown_architecture_is_refused_and_the_known_ones_are_named(architectures):
    error = fault({**KEYS, "model_type": "gpt2", "architectures": architectures})
    assert error.key == "config.architecture" and "Qwen3ForCausalLM" in str(error)


def test_the_model_type_stands_in_for_a_missing_architecture():
    keys = {name: value for name, value in KEYS.items() if name != "architectures"}
    assert parse_config(keys).architecture == "Qwen2ForCausalLM"
    assert fault({}).key == "config.architecture"


# The file itself


@pytest.mark.parametrize(
    ("content", "key"),
    [(b"", "config.not_json"), (b"{", "config.not_json"), (b"[]", "config.not_json"), (b"null", "config.not_json"),
     (b"\xff\xfe{}", "config.not_json"), (b"[" * 100_000, "config.not_json"), (b"{}", "config.architecture"),
     (b'{"vocab_size": ' + b"9" * 5000 + b"}", "config.not_json")],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, key):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_config(tmp_path / "config.json")
    assert caught.value.key == key


def test_a_missing_file_and_a_folder_in_its_place_are_named(tmp_path):
    for path, key in ((tmp_path / "config.json", "config.missing"), (tmp_path, "config.unreadable")):
        with pytest.raises(InputError) as caught:
            read_config(path)
        assert caught.value.key == key and str(path) in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**30, 10**40) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["yarn", "llama3", "linear", "default", "sliding_attention", 1e-6, 0.5, 1e300, 4, 128]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "type", *YARN]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
NAMES = st.sampled_from([*KEYS, "rope_scaling", "rope_parameters", "layer_types", "head_dim", "attention_bias"])


@settings(max_examples=800, derandomize=True, deadline=1000)
@given(
    st.sampled_from([KEYS, MISTRAL, LLAMA]), st.dictionaries(NAMES, JSON, max_size=3), st.sets(NAMES, max_size=1)
)
def test_a_mutated_configuration_is_a_model_or_one_sentence(base, changed, removed):
    keys = {name: value for name, value in {**deepcopy(base), **changed}.items() if name not in removed}
    try:
        config = parse_config(keys)
    except InputError as error:
        assert len(str(error)) < 500
        return
    assert isinstance(config, ModelConfig)
    assert count_parameters(config).total > 0
    assert all(config.window(i) is None or config.window(i) > 0 for i in range(config.num_hidden_layers))
