"""Llama (also SmolLM2, Mistral-style checkpoints with sliding layers)."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.cache import KVCache
from dflash_jax.config import TargetConfig
from dflash_jax.layers import Linear, Masks, RMSNorm, Rotation, SwiGLU, attend, head_major, heads, rotate
from dflash_jax.targets.decoder import Decoder


class Attention(nn.Module):
    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], turn: Rotation, masks: Masks, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        c = self.config
        q = heads(Linear(c.num_heads * c.head_dim, c.attention_bias, name="q_proj")(x), c.head_dim)
        k = heads(Linear(c.num_kv_heads * c.head_dim, c.attention_bias, name="k_proj")(x), c.head_dim)
        v = heads(Linear(c.num_kv_heads * c.head_dim, c.attention_bias, name="v_proj")(x), c.head_dim)
        q, k = rotate(q, turn), rotate(k, turn)
        new = KVCache(head_major(k), head_major(v))
        y = attend(q, new, cache, masks)
        return Linear(c.hidden_size, c.attention_out_bias, name="o_proj")(y), new


class Layer(nn.Module):
    config: TargetConfig
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], turn: Rotation, masks: Masks, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        c = self.config
        y, new = Attention(c, name="self_attn")(
            RMSNorm(c.rms_norm_eps, name="input_layernorm")(x), turn, masks, cache
        )
        x = x + y
        y = SwiGLU(c.intermediate_size, c.mlp_bias, name="mlp")(
            RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        )
        return x + y, new


class Llama(Decoder):
    layer = Layer
