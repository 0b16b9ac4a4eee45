"""Masks against the rule in words: a query sees earlier tokens and itself, no padding, only its window."""

import pytest
import torch

from decodescope.model.config import ModelConfig, parse_config
from decodescope.model.mask import Mask, build_masks
from families import BY_NAME, Family


def config_with(windows: tuple[int | None, ...]) -> ModelConfig:
    keys = dict(
        architectures=["Qwen2ForCausalLM"], vocab_size=7, hidden_size=8, intermediate_size=8, num_attention_heads=2,
        num_hidden_layers=len(windows),
    )  # fmt: skip
    window = next((w for w in windows if w), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    switched = dict(use_sliding_window=True, sliding_window=window, layer_types=kinds) if window else {}
    config = parse_config({**keys, **switched})
    assert [config.window(i) for i in range(len(windows))] == list(windows)
    return config


def sees(query: int, key: int, window: int | None, padding: int) -> bool:
    """Whether the token in column `query` may look at the one in column `key`."""
    return padding <= key <= query and (window is None or query - key < window)


def visible(mask: Mask, row: int, query: int, key: int, T: int, S: int) -> bool:
    if mask.visible is not None:
        assert not mask.is_causal
        rows = mask.visible.shape[0]
        assert mask.visible.shape[1:] == (1, T, S) and mask.visible.dtype == torch.bool
        return bool(mask.visible[row if rows > 1 else 0, 0, query, key])
    # torch's is_causal aligns query 0 with key 0, so it is right only where nothing is cached.
    assert not mask.is_causal or T == S
    return key <= query if mask.is_causal else True


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("padding", [None, [0, 2], [3, 0], [1, 4]], ids=str)
def test_every_mask_is_the_rule(window, padding):
    config = config_with((window,))
    columns = None if padding is None else torch.tensor(padding)
    for T in range(1, 6):
        for start in range(5):
            S = start + T
            (mask,) = build_masks(config, T, start, columns, torch.device("cpu"))
            for row, pad in enumerate(padding or [0]):
                for query in range(T):
                    at = start + query
                    seen = [visible(mask, row, query, key, T, S) for key in range(S)]
                    if at < pad:  # padding itself: anything but nothing, which would be NaN
                        assert any(seen)
                        continue
                    assert seen == [sees(at, key, window, pad) for key in range(S)], (T, start, row, query)


def test_no_tensor_is_built_where_order_alone_says_it():
    config = config_with((None,))
    cpu = torch.device("cpu")
    assert build_masks(config, 6, 0, None, cpu) == [Mask(is_causal=True)]
    assert build_masks(config, 1, 9, None, cpu) == [Mask()]
    assert build_masks(config, 1, 0, None, cpu) == [Mask()]
    assert build_masks(config_with((9,)), 6, 0, None, cpu) == [Mask(is_causal=True)]  # the window is not reached


def test_layers_of_one_kind_share_one_mask():
    masks = build_masks(config_with((None, 3, None, 3)), 4, 2, None, torch.device("cpu"))
    assert masks[0] is masks[2] and masks[1] is masks[3] and masks[0] is not masks[1]
    assert masks[0].visible is not None and masks[1].visible is not None
    assert not torch.equal(masks[0].visible, masks[1].visible)


@pytest.mark.parametrize("name", ["qwen2-window", "mistral-window"])
def test_the_rule_is_transformers_rule(name):
    """With one layer, token 0 changes the last logits exactly while the window still reaches it."""
    settings = {**BY_NAME[name].settings, "num_hidden_layers": 1, "max_window_layers": 0}
    model, window = Family(name, BY_NAME[name].architecture, settings).reference(), settings["sliding_window"]
    for length in range(window - 1, window + 3):
        ids = torch.arange(length)[None]
        other = ids.clone()
        other[0, 0] = 90
        differs = not torch.equal(model(ids).logits[0, -1], model(other).logits[0, -1])
        assert differs == sees(length - 1, 0, window, 0), length
