"""Qwen3.5 (dense, text): gated delta layers, and full attention with an output gate in between.

Parameters are the Hugging Face checkpoint's own, names, values and shapes: norms hold w of (1 + w), A_log
is a logarithm, the convolution is [channels, 1, width], a query head's rows are followed by its gate's.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dflash_jax.block import Block
from dflash_jax.cache import KVCache, RecurrentState, States, Tape
from dflash_jax.config import TargetConfig
from dflash_jax.gated_delta import convolve, delta_block, states_of
from dflash_jax.layers import (
    Linear,
    Masks,
    Rotation,
    SwiGLU,
    attend,
    head_major,
    heads,
    parameter,
    rotate,
)
from dflash_jax.targets.decoder import Decoder, Remember, View


class Norm(nn.Module):
    """RMS norm over the last axis, times (1 + weight), rounded once at the end."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
        weight = parameter(self, "weight", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = 1.0 + weight.astype(jnp.float32)
        return (wide * scale.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm of a delta head's output, times weight (not 1 + weight), times silu(gate).

    x is float32 and has the gate's dtype before the weight, as if the rule had been computed in it.
    """

    eps: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T Hv W"], gate: Float[Array, "B T Hv W"]
    ) -> Float[Array, "B T Hv W"]:
        weight = parameter(self, "weight", nn.initializers.ones, (x.shape[-1],))
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        x = x.astype(gate.dtype) * weight[None, None, None]
        return (x.astype(jnp.float32) * nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


class Attention(nn.Module):
    """Rotates the first `rotary_dim` of each head; the result is gated by sigmoid, value by value."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], turn: Rotation, masks: Masks, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        c = self.config
        both = heads(Linear(2 * c.num_heads * c.head_dim, c.attention_bias, name="q_proj")(x), 2 * c.head_dim)
        q, gate = jnp.split(both, 2, axis=-1)
        k = heads(Linear(c.num_kv_heads * c.head_dim, c.attention_bias, name="k_proj")(x), c.head_dim)
        v = heads(Linear(c.num_kv_heads * c.head_dim, c.attention_bias, name="v_proj")(x), c.head_dim)
        q = self.rotate_part(Norm(c.rms_norm_eps, name="q_norm")(q), turn)
        k = self.rotate_part(Norm(c.rms_norm_eps, name="k_norm")(k), turn)
        new = KVCache(head_major(k), head_major(v))
        y = attend(q, new, cache, masks)
        y = y * nn.sigmoid(gate.reshape(y.shape))
        return Linear(c.hidden_size, c.attention_out_bias, name="o_proj")(y), new

    def rotate_part(self, x: Float[Array, "B T n H"], turn: Rotation) -> Float[Array, "B T n H"]:
        turning, still = jnp.split(x, [self.config.rotary_dim], axis=-1)
        return jnp.concatenate([rotate(turning, turn), still], axis=-1)


class Conv1d(nn.Module):
    """The weight of the depthwise convolution, under the name and in the shape of its file."""

    channels: int
    width: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T ch"], conv: Float[Array, "B w ch"], block: Block
    ) -> Float[Array, "B T ch"]:
        weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.channels, 1, self.width))
        return convolve(x, conv, weight[:, 0], block)


class GatedDelta(nn.Module):
    """Convolution, gated delta rule and gated norm. Between the projections everything is float32."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], block: Block, cache: RecurrentState, trail: Remember
    ) -> tuple[Float[Array, "B T D"], Tape | States]:
        c, r = self.config, self.config.recurrent
        assert r is not None
        inputs = Linear(r.channels, name="in_proj_qkv")(x)
        gate = heads(Linear(r.value_heads * r.value_dim, name="in_proj_z")(x), r.value_dim)
        write = Linear(r.value_heads, name="in_proj_b")(x).astype(jnp.float32)
        step = Linear(r.value_heads, name="in_proj_a")(x).astype(jnp.float32)
        step = step + self.per_head("dt_bias", nn.initializers.ones)
        g = -jnp.exp(self.per_head("A_log", nn.initializers.zeros)) * jax.nn.softplus(step)

        mixed = nn.silu(Conv1d(r.channels, r.conv_width, name="conv1d")(inputs, cache.conv, block))
        keys = r.key_heads * r.key_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        q, k, v = heads(q, r.key_dim), heads(k, r.key_dim), heads(v, r.value_dim)
        o, parts = delta_block(q, k, v, g, nn.sigmoid(write), cache.s, block)
        y = GatedNorm(c.rms_norm_eps, name="norm")(o, gate)
        left = (
            Tape(*parts, conv=inputs)
            if trail == "tape"
            else States(states_of(parts, cache.s, block), conv=inputs)
        )
        return Linear(c.hidden_size, name="out_proj")(y.reshape(*y.shape[:2], -1)), left

    def per_head(self, name: str, init: nn.initializers.Initializer) -> Float[Array, "1 1 Hv"]:
        assert self.config.recurrent is not None
        value = parameter(self, name, init, (self.config.recurrent.value_heads,))
        return value.astype(jnp.float32)[None, None]


class Layer(nn.Module):
    """make_mlp: what a family of these layers has of its own."""

    config: TargetConfig
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], view: View, cache: KVCache | RecurrentState, trail: Remember
    ) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
        c = self.config
        h = Norm(c.rms_norm_eps, name="input_layernorm")(x)
        y: Array
        left: KVCache | Tape | States
        if isinstance(cache, RecurrentState):
            y, left = GatedDelta(c, name="linear_attn")(h, view.block, cache, trail)
        else:
            y, left = Attention(c, name="self_attn")(h, view.turn, view.masks[c.window(self.index)], cache)
        x = x + y
        return x + self.make_mlp()(Norm(c.rms_norm_eps, name="post_attention_layernorm")(x)), left

    def make_mlp(self) -> nn.Module:
        return SwiGLU(self.config.intermediate_size, self.config.mlp_bias, name="mlp")


class Qwen35(Decoder):
    layer = Layer
    final_norm = Norm

    def run_layer(
        self,
        index: int,
        x: Float[Array, "B T D"],
        view: View,
        cache: KVCache | RecurrentState,
        trail: Remember,
    ) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
        return self.layers[index](x, view, cache, trail)
