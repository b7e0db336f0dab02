"""Caches, and the only functions that write them.

Verify returns a *trail*: what the forward computed for each node of the block. `commit` selects a
path of the trail into the next cache. What was not selected never existed, so there is no rollback
code: "crop", "snapshot + restore" and "compact the accepted path" of other implementations are this
one gather. An old cache is untouched and can be continued again.

Slots at and beyond `length` hold garbage by definition; every reader masks them. Allocated slots =
capacity + the largest write, because `dynamic_update_slice` clamps silently at the end of a buffer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from dflash_jax.config import DraftConfig, TargetConfig


@struct.dataclass
class KVCache:
    """Keys and values of one attention layer, [B, K, S, H]: one contiguous matrix per head, which
    is the layout the two attention matmuls read. Keys carry their rotation already."""

    k: Array
    v: Array

    @property
    def slots(self) -> int:
        return self.k.shape[2]


@struct.dataclass
class TargetCache:
    """layers: one cache per target layer. length [B] i32: committed positions per row."""

    layers: tuple[KVCache, ...]
    length: Array


@struct.dataclass
class DraftCache:
    """layers: the draft's context keys and values, one per draft layer. length [B] i32."""

    layers: tuple[KVCache, ...]
    length: Array


# What a layer of one forward leaves behind: the rows its cache would have grown by, [B, K, T, H].
Trail = tuple[KVCache, ...]


def target_cache(config: TargetConfig, batch: int, slots: int, dtype) -> TargetCache:
    """An empty cache. Memory: 2 * L * B * K * slots * H * itemsize bytes."""
    return TargetCache(_empty_layers(config, batch, slots, dtype), jnp.zeros(batch, jnp.int32))


def draft_cache(config: DraftConfig, batch: int, slots: int, dtype) -> DraftCache:
    return DraftCache(_empty_layers(config, batch, slots, dtype), jnp.zeros(batch, jnp.int32))


def _empty_layers(config: TargetConfig | DraftConfig, batch: int, slots: int, dtype) -> tuple[KVCache, ...]:
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    return tuple(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def cache_bytes(config: TargetConfig | DraftConfig, batch: int, slots: int, itemsize: int) -> int:
    return 2 * config.num_layers * batch * config.num_kv_heads * slots * config.head_dim * itemsize


def commit(cache: TargetCache, trail: Trail, path: Int[Array, "B P"], count: Int[Array, " B"]) -> TargetCache:
    """The next cache: rows `path[b, :count[b]]` of the trail, appended at `length[b]`.

    path holds node indices along one root path, in order; entries from `count` on may be anything
    in range (their rows land beyond the new length). count 0 leaves a row as it was.
    """
    with jax.named_scope("commit"):
        nodes = path[:, None, :, None]
        chosen = tuple(
            KVCache(jnp.take_along_axis(rows.k, nodes, 2), jnp.take_along_axis(rows.v, nodes, 2))
            for rows in trail
        )
        return TargetCache(_append(cache.layers, chosen, cache.length), cache.length + count)


def extend_context(cache: DraftCache, rows: Trail, count: Int[Array, " B"]) -> DraftCache:
    """The draft's context grown by the first `count[b]` of `rows`."""
    return DraftCache(_append(cache.layers, rows, cache.length), cache.length + count)


def _append(layers: tuple[KVCache, ...], rows: Trail, at: Int[Array, " B"]) -> tuple[KVCache, ...]:
    write = jax.vmap(lambda buffer, new, start: lax.dynamic_update_slice(buffer, new, (0, start, 0)))
    return tuple(
        KVCache(write(old.k, new.k, at), write(old.v, new.v, at))
        for old, new in zip(layers, rows, strict=True)
    )


def prefix(cache, slots: int):
    """A view for reading: the first `slots` slots of every layer. Attention costs what it reads, so
    the caller passes the shortest prefix that covers the longest committed row."""
    if all(layer.slots <= slots for layer in cache.layers):
        return cache
    layers = tuple(KVCache(layer.k[:, :, :slots], layer.v[:, :, :slots]) for layer in cache.layers)
    return cache.replace(layers=layers)


def grow(cache, slots: int):
    """The same cache with room for `slots` slots (a host function, between calls)."""

    def wider(buffer: Array) -> Array:
        return jnp.pad(buffer, ((0, 0), (0, 0), (0, max(0, slots - buffer.shape[2])), (0, 0)))

    return cache.replace(layers=tuple(KVCache(wider(layer.k), wider(layer.v)) for layer in cache.layers))
