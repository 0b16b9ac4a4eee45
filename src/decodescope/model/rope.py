"""Rotary position embedding: frequencies (default, linear, llama3, yarn) and the tables made of them.

RoPE: https://arxiv.org/abs/2104.09864; YaRN: https://arxiv.org/abs/2309.00071; the llama3 rule is the one
published with Llama 3.1. Angles are float32; the tables are cast to the activations' dtype.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodescope.errors import InputError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. `divisors` (GGUF's `rope_freqs`) divide the frequencies first."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, keys: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5), of a config.json.

        Raises InputError for a kind or a parameter that is not implemented.
        """
        found = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
        if not isinstance(found, Mapping):
            raise _refused("rope_scaling", found)
        given = {name: value for name, value in found.items() if value is not None}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        theta = given.pop("rope_theta", keys.get("rope_theta", 10000.0))
        for partial in (given.pop("partial_rotary_factor", 1.0), keys.get("partial_rotary_factor", 1.0)):
            if partial not in (1, None):
                raise InputError("config.unsupported", name="partial_rotary_factor", value=str(partial)[:80])
        if not isinstance(kind, str) or kind not in _NEEDED:
            raise _refused("rope_type", kind)
        if kind in ("yarn", "llama3"):
            given.setdefault("original_max_position_embeddings", keys.get("max_position_embeddings", 0))
        _check_parameters(kind, given)
        if kind == "default":
            given = {}
        return cls(theta=_number("rope_theta", theta, above=1), kind=kind, **given)


def _check_parameters(kind: str, given: Mapping[str, Any]) -> None:
    allowed = {*_NEEDED[kind], "original_max_position_embeddings"}
    if kind == "yarn":
        allowed |= _YARN_OPTIONAL | {"truncate"}
    for name in _NEEDED[kind]:
        if name not in given:
            raise InputError("config.missing_key", name=f"rope_scaling.{name}")
    for name, value in given.items():
        if name not in allowed or (name == "truncate" and type(value) is not bool):
            raise _refused(name, value)
        if name != "truncate":
            _number(name, value, above=1e-6)
    if kind == "llama3" and not given["low_freq_factor"] < given["high_freq_factor"]:
        raise _refused("high_freq_factor", given["high_freq_factor"])


def _number(name: str, value: Any, above: float) -> float:
    if type(value) not in (int, float) or not above < value <= 1e12:
        raise _refused(name, value)
    return float(value)


def _refused(name: str, value: Any) -> InputError:
    return InputError("config.rope", name=name[:80], value=str(value)[:80])


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [d/2] in float32 and the factor applied to cos and sin.

    Pair i turns by theta^(-2i/d) per position; the scalings change these numbers, never the equation.
    """
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # d/2
    if rope.divisors is not None:
        base = base / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    turns = rope.original_max_position_embeddings / wavelength
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(turns < low, base / rope.factor, blended)
    return torch.where(turns > high, base, scaled)


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often keep their frequency, slow ones are interpolated, with a ramp between."""

    def pair_of(turns: float) -> float:
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotary_table(
    frequencies: Tensor, positions: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, T, d] for integer `positions` [B, T]."""
    angles = positions[:, None, :, None].float() * frequencies  # B 1 T d/2
    both_halves = torch.cat((angles, angles), dim=-1)  # B 1 T d
    return (both_halves.cos() * factor).to(dtype), (both_halves.sin() * factor).to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + d/2) of x [B, H, T, d] by its position's angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)  # B H T d/2
    return x * cos + torch.cat((-second, first), dim=-1) * sin
