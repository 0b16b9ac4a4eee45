"""The forward pass of Qwen2, Qwen3, Llama and Mistral on one page.

    B batch rows            H query heads           d size of a head
    T new positions         K key/value heads       F width of the MLP
    S cached + new          D hidden size           V vocabulary rows

Each query head h reads the keys and values of head h * K // H (grouped-query attention). Parameter names are
the checkpoint's; the names of the local variables are the sites of `probe.SITES`, and the guarded line that ends
a function shows them to a tap, if there is one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodescope.model.attend import attend
from decodescope.model.config import ModelConfig
from decodescope.model.linear import Embedding, Linear, together
from decodescope.model.mask import Mask, build_masks
from decodescope.model.ragged import Cache
from decodescope.model.rope import inverse_frequencies, rotary_table, rotate
from decodescope.probe import Attended, Tap, show

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root mean square norm (https://arxiv.org/abs/1910.07467): w * x / sqrt(mean(x^2) + eps)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()  # squares overflow and lose digits in 16 bits
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * unit.to(x.dtype)  # scaled after casting back, as the checkpoints were trained


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.head_dim = layer, d
        self.q_proj = Linear(D, H * d, bias=config.qkv_bias)
        self.k_proj = Linear(D, K * d, bias=config.qkv_bias)
        self.v_proj = Linear(D, K * d, bias=config.qkv_bias)
        self.o_proj = Linear(H * d, D, bias=config.o_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # B T (H d) -> B H T d

    def forward(
        self, attn_norm: Tensor, rotary: Rotary, mask: Mask, cache: Cache | None, tap: Tap | None = None
    ) -> Tensor:
        q, k, v = map(self.heads, together(attn_norm, self.q_proj, self.k_proj, self.v_proj))  # B H|K|K T d
        q_norm, k_norm = self.q_norm(q), self.k_norm(k)  # B H T d, B K T d
        q_rot = rotate(q_norm, rotary)  # B H T d
        k_rot = rotate(k_norm, rotary)  # B K T d
        keys, values = (k_rot, v) if cache is None else cache.append(self.layer, k_rot, v)  # B K S d
        z = attend(q_rot, keys, values, mask)  # B H T d
        attn_out: Tensor = self.o_proj(z.transpose(1, 2).flatten(2))  # B T D
        if tap is not None:
            scores = pattern = Attended(q_rot, keys, values, z, mask.visible)
            show(tap, self.layer, q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm, q_rot=q_rot, k_rot=k_rot,
                 scores=scores, pattern=pattern, z=z, attn_out=attn_out)  # fmt: skip
        return attn_out


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        D, width = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, width, bias=config.mlp_bias)
        self.up_proj = Linear(D, width, bias=config.mlp_bias)
        self.down_proj = Linear(width, D, bias=config.mlp_bias)

    def forward(self, mlp_norm: Tensor, tap: Tap | None = None) -> Tensor:
        gate, up = together(mlp_norm, self.gate_proj, self.up_proj)  # B T F, B T F
        act = F.silu(gate) * up  # B T F
        mlp_out: Tensor = self.down_proj(act)  # B T D
        if tap is not None:
            show(tap, self.layer, gate=gate, up=up, act=act, mlp_out=mlp_out)
        return mlp_out


class Block(nn.Module):
    """One layer: the residual stream, to which attention and MLP each add their part."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, layer)

    def forward(
        self, resid_pre: Tensor, rotary: Rotary, mask: Mask, cache: Cache | None, tap: Tap | None = None
    ) -> Tensor:
        attn_norm = self.input_layernorm(resid_pre)  # B T D
        resid_mid = resid_pre + self.self_attn(attn_norm, rotary, mask, cache, tap)  # B T D
        mlp_norm = self.post_attention_layernorm(resid_mid)  # B T D
        resid_post: Tensor = resid_mid + self.mlp(mlp_norm, tap)  # B T D
        if tap is not None:
            show(tap, self.layer, resid_pre=resid_pre, attn_norm=attn_norm, resid_mid=resid_mid, mlp_norm=mlp_norm,
                 resid_post=resid_post)  # fmt: skip
        return resid_post


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """ids -> logits of the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.held_as: str | None = None  # what the matrices are held in, where it is not `dtype`: packed, int8 ...
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.device("cpu"):
            frequencies, self.rope_factor = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("rope_frequencies", frequencies, persistent=False)
        self.rope_frequencies: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations: residual stream, norms, logits. Matrices may be held in fewer bits."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where ids go in and logits come out."""
        return self.model.norm.weight.device

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        *,
        every_logit: bool = False,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits [B, 1, V] of the last position, or [B, T, V] with `every_logit`.

        `ids` [B, T] continue what `cache` holds; `padding` [B] counts the columns at each row's left that are
        no tokens. `tap` looks at the inner values and changes none.
        """
        start = 0 if cache is None else cache.length
        resid = embed = self.model.embed_tokens(ids).to(self.dtype)  # B T D
        masks = build_masks(self.config, ids.shape[1], start, padding, ids.device)
        positions = _positions(ids.shape[1], start, padding, ids.device)  # B T
        rotary = rotary_table(self.rope_frequencies, positions, self.rope_factor, resid.dtype)  # B 1 T d
        for layer, block in enumerate(self.model.layers):
            resid = block(resid, rotary, masks[layer], cache, tap)  # B T D
        if cache is not None:
            cache.advance(ids.shape[1])
        final_norm = self.model.norm(resid if every_logit else resid[:, -1:])  # B T D
        logits: Tensor = self.lm_head(final_norm)  # B T V
        if tap is not None:
            show(tap, None, embed=embed, final_norm=final_norm, logits=logits)
        return logits


def _positions(T: int, start: int, padding: Tensor | None, device: torch.device) -> Tensor:
    columns = torch.arange(start, start + T, device=device)[None]  # 1 T
    return columns if padding is None else (columns - padding[:, None]).clamp(min=0)  # B T
