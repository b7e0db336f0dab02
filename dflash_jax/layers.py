"""The maths that every model here shares. Models differ in how they put these together.

Products are those of numerics.py. Norms, angles and softmax are float32 whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.block import Block, visible
from dflash_jax.cache import KVCache, Ring
from dflash_jax.config import RopeConfig
from dflash_jax.numerics import contract

_INIT = nn.initializers.normal(0.02)


def parameter(module: nn.Module, name: str, init: Callable, shape: tuple[int, ...]) -> Array:
    """`module.param`, which traces its initialiser again in every forward: only where there is no value
    yet. (By profile about a quarter of the tracing time of a 30-layer model.)"""
    value: Array | None = module.get_variable("params", name)
    return module.param(name, init, shape) if value is None else value


class Linear(nn.Module):
    """x @ weight.T + bias, in the dtype of x. weight [out, in], as every file has it.

    Written weight-first, because a block has few rows: with the weight as the left operand and
    contiguous contraction, XLA's CPU backend takes 16 ms where x @ kernel[in, out] takes 27 (8 rows
    of SmolLM2's MLPs, 2 cores); 9.3 against 11.6 at 1 row. GPUs do not care.
    """

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T i"]) -> Float[Array, "B T o"]:
        weight = parameter(self, "weight", _INIT, (self.features, x.shape[-1]))
        y = contract("fd,btd->fbt", weight, x).transpose(1, 2, 0)
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(jnp.float32)[None, None]
        return y.astype(x.dtype)


class Table(nn.Module):
    """A vocabulary table, weight [V, D]: rows are embeddings, or what the head contracts with."""

    rows: int
    features: int

    def setup(self) -> None:
        self.weight = parameter(self, "weight", _INIT, (self.rows, self.features))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.weight, tokens, axis=0, mode="clip")

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32."""
        return contract("btd,vd->btv", hidden, self.weight)


class RMSNorm(nn.Module):
    """Over the last axis. Llama, Qwen2, Qwen3 and the draft round before multiplying by weight."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
        weight = parameter(self, "weight", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


class SwiGLU(nn.Module):
    intermediate_size: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Linear(self.intermediate_size, self.use_bias, name="gate_proj")(x)
        up = Linear(self.intermediate_size, self.use_bias, name="up_proj")(x)
        return Linear(x.shape[-1], self.use_bias, name="down_proj")(nn.silu(gate) * up)


# --- rotary positions --------------------------------------------------------------------------------


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] (float32) and the factor on cos and sin.

    The four rules of transformers' `modeling_rope_utils`; yarn is arXiv 2309.00071.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.divisors:
        return inverse / np.asarray(rope.divisors, np.float32), 1.0
    if rope.type == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.type == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * np.pi / inverse
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    scaled = np.where(wavelength > longest, inverse / rope.factor, inverse)
    return np.where((wavelength <= longest) & (wavelength >= shortest), between, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies that turn often are kept, those that turn rarely are stretched by `factor`."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    blended = inverse / rope.factor * ramp + inverse * (1 - ramp)
    return blended.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


@struct.dataclass
class Rotation:
    """cos and sin of every position, [B, T, 1, H/2] float32, shared by all layers of a forward."""

    cos: Array
    sin: Array


def rotation(rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]) -> Rotation:
    inverse, factor = rope_frequencies(rope, head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(inverse)[None, None, None]
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Float[Array, "B T heads H"], by: Rotation) -> Float[Array, "B T heads H"]:
    """Half-split rotary embedding: dimension i pairs with i + H/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# --- attention over committed cache + block -----------------------------------------------------------


def heads(x: Float[Array, "B T f"], head_dim: int) -> Float[Array, "B T n h"]:
    return x.reshape(*x.shape[:2], -1, head_dim)


def head_major(x: Float[Array, "B T K H"]) -> Float[Array, "B K T H"]:
    return x.swapaxes(1, 2)


@struct.dataclass
class Masks:
    """Who a block row may see: committed slots [B, T or 1, S] and rows of its block [B, T, T]."""

    committed: Array
    block: Array


def committed_mask(
    length: Int[Array, " B"],
    positions: Int[Array, "B T"],
    slots: int,
    window: int | None,
    ring: Ring | None = None,
) -> Bool[Array, "B t S"]:
    """Slot s holds position s (in a ring: see Ring.held) and is visible while committed, and inside the
    window if there is one."""
    end = length[:, None, None]
    held = jnp.arange(slots)[None, None, :]
    if ring is None:
        mask = held < end
    else:
        held = ring.held(held, end)
        mask = held >= jnp.maximum(0, end - ring.window)
    if window is not None:
        mask = mask & (positions[:, :, None] - held < window)
    return mask


def target_masks(block: Block, length: Int[Array, " B"], slots: int, window: int | None) -> Masks:
    positions = length[:, None] + block.depth
    mask = visible(block)
    if window is not None:
        mask = mask & (block.depth[:, :, None] - block.depth[:, None, :] < window)
    return Masks(committed_mask(length, positions, slots, window), mask)


def attend(q: Float[Array, "B T N H"], new: KVCache, cache: KVCache, masks: Masks) -> Float[Array, "B T NH"]:
    """Grouped-query attention of block rows to committed slots and to rows of their own block.

    new: keys and values of the block [B, K, T, H]; cache: committed ones [B, K, S, H]. One softmax
    over both parts; the keys are never concatenated, so a long cache is read in place.
    """
    batch, rows, num_heads, head_dim = q.shape
    kv_heads, slots = new.k.shape[1], cache.slots
    groups = num_heads // kv_heads
    q = q.reshape(batch, rows, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * rows, head_dim)  # one matmul per key/value head

    def scores(keys: Array, mask: Array) -> Array:
        raw = contract("bkqh,bksh->bkqs", q, keys) * head_dim**-0.5
        raw = raw.reshape(batch, kv_heads, groups, rows, keys.shape[2])
        return jnp.where(mask[:, None, None], raw, -jnp.inf)

    joint = jnp.concatenate([scores(cache.k, masks.committed), scores(new.k, masks.block)], axis=-1)
    weights = jax.nn.softmax(joint, axis=-1).astype(new.v.dtype)
    weights = weights.reshape(batch, kv_heads, groups * rows, slots + rows)
    # Slots that no row may see count 0 times what they hold, which is 0 as that is finite (cache.py sees to it).
    # Masking the values here instead would copy them in every round: at 4,096 slots more than half of its time.
    out = contract("bkqs,bksh->bkqh", weights[..., :slots], cache.v)
    out = out + contract("bkqs,bksh->bkqh", weights[..., slots:], new.v)
    out = out.reshape(batch, kv_heads, groups, rows, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, num_heads * head_dim).astype(q.dtype)
