"""The draft's training forward: many blocks of one sequence at once.

The maths is the decoding draft's own (`dflash_jax.drafts.dflash`): the same modules project, norm,
rotate and mix. What differs is who sees what. Decoding has one block behind a cache; here a sequence
has A blocks, and each sees the context strictly before its own anchor, and itself. (`<=` would leak
the anchor's features, which decoding does not have yet: accuracy superb, acceptance 1.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.cache import KVCache
from dflash_jax.config import DraftConfig
from dflash_jax.drafts.dflash import DFlash, Layer
from dflash_jax.layers import Rotation, heads, rotate, rotation
from dflash_jax.numerics import contract

_GROUP = 32  # anchors whose scores live at once


@struct.dataclass
class Visibility:
    """What slot k of block a may see: context positions [B, A, C, S], slots of its block [1, 1, C, C]."""

    context: Array
    block: Array


def hidden_states(
    draft: DFlash,
    params: dict,
    features: Float[Array, "B S PD"],
    embeddings: Float[Array, "B A C D"],
    anchors: Int[Array, "B A"],
    remat: bool = True,
) -> Float[Array, "B A c D"]:
    """Final hidden states of slots 1..C-1 of each block: what `DFlash.propose` gives on a cache that
    holds the features of positions 0 .. anchor-1. remat: recompute attention in the backward pass."""
    hidden: Any = draft.apply({"params": params}, features, embeddings, anchors, remat, method=_hidden_states)
    return hidden


def _hidden_states(
    draft: DFlash, features: Array, embeddings: Array, anchors: Array, remat: bool
) -> Float[Array, "B A c D"]:
    c = draft.config
    batch, count, size, width = embeddings.shape
    length = features.shape[1]
    every = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    context = draft.context_rows(features, every)
    positions = anchors[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    turn = rotation(c.rope, c.head_dim, positions.reshape(batch, -1))
    x = embeddings * jnp.asarray(c.embedding_scale, embeddings.dtype)
    x = x.reshape(batch, count * size, width)
    for i, layer in enumerate(draft.layers):
        with jax.named_scope(f"draft_layer_{i}"):
            x = _layer(layer, x, turn, context[i], visibility(c, i, anchors, positions, length), remat)
    return draft.norm(x).reshape(batch, count, size, width)[:, :, 1:]


def visibility(
    c: DraftConfig, layer: int, anchors: Int[Array, "B A"], positions: Int[Array, "B A C"], length: int
) -> Visibility:
    """The rules of DFlash._masks, per block: context strictly before the anchor, inside the window."""
    window = c.window(layer)
    key = jnp.arange(length, dtype=jnp.int32)[None, None, None]
    context = jnp.broadcast_to(key < anchors[:, :, None, None], (*positions.shape, length))
    slot = jnp.arange(positions.shape[2])
    ahead = slot[None, :] - slot[:, None]
    block = ahead <= 0 if c.causal[layer] else jnp.ones_like(ahead, bool)
    if window is not None:
        context = context & (positions[..., None] - key < window)
        block = block & (jnp.abs(ahead) < window)
    return Visibility(context, block[None, None])


def _layer(
    layer: Layer, x: Array, turn: Rotation, context: KVCache, sees: Visibility, remat: bool
) -> Float[Array, "B R D"]:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    q = rotate(attention.q_norm(heads(attention.q_proj(normed), layer.config.head_dim)), turn)
    attend = jax.checkpoint(attend_blocks) if remat else attend_blocks
    x = x + attention.o_proj(in_groups(attend, q, attention.keys_values(normed, turn), context, sees))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def in_groups(
    attend: Callable, q: Float[Array, "B R N H"], own: KVCache, context: KVCache, sees: Visibility
) -> Float[Array, "B R NH"]:
    """`attend` for a few anchors at a time: their scores are [N, R, S] floats, more than everything else in a
    layer when S is long. Recomputed group by group, they never exist at once."""
    batch, count, size, _ = sees.context.shape
    group = max(n for n in range(1, _GROUP + 1) if count % n == 0)
    if group == count:
        return attend(q, own, context, sees)

    def cut(x: Array, axis: int) -> Array:
        """[.., A*C, ..] -> [groups, .., group*C, ..]"""
        x = x.reshape(*x.shape[:axis], count // group, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    pieces = cut(q, 1), cut(own.k, 2), cut(own.v, 2), cut(sees.context, 1)
    out = lax.map(lambda p: attend(p[0], KVCache(p[1], p[2]), context, Visibility(p[3], sees.block)), pieces)
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * size, -1)


def attend_blocks(
    q: Float[Array, "B R N H"], own: KVCache, context: KVCache, sees: Visibility
) -> Float[Array, "B R NH"]:
    """R = A * C queries: each sees its sequence's context up to its own limit and the C slots of its own
    block, merged in one softmax. No [R, S + R] mask or score matrix exists: scores are [R, S] and [R, C].

    own: keys and values of all blocks [B, K, R, H]. context: of the sequence [B, K, S, H].
    """
    batch, rows, num_heads, head_dim = q.shape
    _, count, size, length = sees.context.shape
    kv_heads = own.k.shape[1]
    groups = num_heads // kv_heads
    # [B, A, C, K, G, H] -> [B, K, G, A, C, H]
    q = q.reshape(batch, count, size, kv_heads, groups, head_dim).transpose(0, 3, 4, 1, 2, 5)
    in_blocks = partial(jnp.reshape, shape=(batch, kv_heads, count, size, head_dim))

    outside = contract("bkgach,bksh->bkgacs", q, context.k) * head_dim**-0.5
    inside = contract("bkgach,bkadh->bkgacd", q, in_blocks(own.k)) * head_dim**-0.5
    outside = _masked(outside, sees.context[:, None, None])
    inside = _masked(inside, sees.block[None, None, :])
    weights = jax.nn.softmax(jnp.concatenate([outside, inside], axis=-1), axis=-1).astype(own.v.dtype)
    out = contract("bkgacs,bksh->bkgach", weights[..., :length], context.v)
    out = out + contract("bkgacd,bkadh->bkgach", weights[..., length:], in_blocks(own.v))
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, rows, num_heads * head_dim).astype(q.dtype)


def _masked(scores: Array, mask: Bool[Array, ...]) -> Array:
    return jnp.where(mask, scores, -jnp.inf)
