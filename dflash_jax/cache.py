"""Caches, and the only functions that write them.

Verify returns a *trail*: what the forward computed for each node of the block. `commit` selects a
path of the trail into the next cache. What was not selected never existed, so there is no rollback
code: "crop", "snapshot + restore" and "compact the accepted path" of other implementations are this
one selection. An old cache is untouched and can be continued again.

Attention layers keep keys and values by position; slots at and beyond `length` hold garbage by
definition, and every reader masks them. Allocated slots = capacity + the largest write, because
`dynamic_update_slice` clamps silently at the end of a buffer. The draft's context may be a ring instead, which
wraps. Recurrent layers keep one state, whatever the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.config import RECURRENT, ConfigError, DraftConfig, RecurrentConfig, TargetConfig


@struct.dataclass
class KVCache:
    """Keys and values of one attention layer, [B, K, S, H]: one contiguous matrix per head, which
    is the layout the two attention matmuls read. Keys carry their rotation already. Slots from a row's length on hold
    finite values of no meaning."""

    k: Array
    v: Array

    @property
    def slots(self) -> int:
        return self.k.shape[2]


@struct.dataclass
class RecurrentState:
    """What one gated delta layer carries over all committed positions.

    s [B, Hv, U, W] float32, whatever the weights are (a bfloat16 state degenerates within a few tokens);
    conv [B, width - 1, channels]: the convolution's last inputs, newest last.
    """

    s: Array
    conv: Array


@struct.dataclass
class Tape:
    """What a gated delta layer must remember of a block to commit any node of it: the state after node r is
    exp(decay_r) s + sum of exp(decay_r - decay_j) k_j delta_j^T over its ancestors-or-self j (ALGORITHMS 4).
    About U times smaller than one state per node.

    k [B, T, Hk, U] normalised keys; delta [B, T, Hv, W]; decay [B, T, Hv]: log-decay summed over
    ancestors-or-self; all float32. conv [B, T, channels]: the convolution's inputs.
    """

    k: Array
    delta: Array
    decay: Array
    conv: Array


@struct.dataclass
class States:
    """The other way to remember a block: the state after every node, s [B, T, Hv, U, W] float32, and the
    convolution's inputs [B, T, channels]."""

    s: Array
    conv: Array


@struct.dataclass
class TargetCache:
    """layers: one per target layer. length [B] i32: committed positions per row."""

    layers: tuple[KVCache | RecurrentState, ...]
    length: Array

    @property
    def slots(self) -> int:
        """Allocated positions of the attention layers."""
        return next(layer.slots for layer in self.layers if isinstance(layer, KVCache))


@dataclasses.dataclass(frozen=True)
class Ring:
    """A draft context that does not grow: position p is in slot p % slots, and the last `window` committed
    positions are visible.

    A write of T rows goes beyond what is committed then, by T rows when none of them is kept, and those land on
    positions up to length + T - 1 - slots. So slots >= window + T, and none of them was visible.
    """

    window: int
    slots: int

    @classmethod
    def of(cls, window: int, rows: int) -> Ring:
        """With room for writes of `rows`."""
        if window < 1:
            raise ConfigError(f"draft_window is {window}: the draft needs at least 1 position")
        return cls(window, window + rows)

    @property
    def rows(self) -> int:
        """The largest write."""
        return self.slots - self.window

    def held(self, slot: Array, length: Array) -> Array:
        """The position in a slot once `length` are committed; negative: none yet."""
        return slot + self.slots * ((length - 1 - slot) // self.slots)

    def covers(self, config: DraftConfig) -> bool:
        """No layer of this draft looks beyond the window, so that the ring is the full context. (Of a layer's window
        one position is the block's own row.)"""
        windows = [config.window(i) for i in range(config.num_layers)]
        return all(window is not None and window - 1 <= self.window for window in windows)


@struct.dataclass
class DraftCache:
    """layers: the draft's context keys and values, one per draft layer. length [B] i32. ring: how slots are used
    again; None: slot p holds position p. (A ring's buffers may be shorter than its slots while that is true of
    it too.)"""

    layers: tuple[KVCache, ...]
    length: Array
    ring: Ring | None = struct.field(pytree_node=False, default=None)

    @property
    def slots(self) -> int:
        return self.layers[0].slots


Cache = TypeVar("Cache", TargetCache, DraftCache)

# What the layers of one forward leave behind: rows of keys and values [B, K, T, H], or a tape or states.
Trail = tuple[KVCache | Tape | States, ...]


def target_cache(config: TargetConfig, batch: int, slots: int, dtype) -> TargetCache:
    """An empty cache. Memory: see cache_bytes."""
    layers = tuple(
        _empty_state(config.recurrent, batch, dtype)
        if kind == RECURRENT and config.recurrent is not None
        else _empty_slots(config, batch, slots, dtype)
        for kind in config.layer_types
    )
    return TargetCache(layers, jnp.zeros(batch, jnp.int32))


def draft_cache(config: DraftConfig, batch: int, slots: int, dtype, ring: Ring | None = None) -> DraftCache:
    """slots: of a full context; a ring takes no more than its own."""
    slots = min(slots, ring.slots) if ring else slots
    layers = tuple(_empty_slots(config, batch, slots, dtype) for _ in range(config.num_layers))
    return DraftCache(layers, jnp.zeros(batch, jnp.int32), ring)


def _empty_slots(config: TargetConfig | DraftConfig, batch: int, slots: int, dtype) -> KVCache:
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _empty_state(config: RecurrentConfig, batch: int, dtype) -> RecurrentState:
    return RecurrentState(
        jnp.zeros((batch, config.value_heads, config.key_dim, config.value_dim), jnp.float32),
        jnp.zeros((batch, config.conv_width - 1, config.channels), dtype),
    )


# --- committing -----------------------------------------------------------------------------------------


def commit(cache: TargetCache, trail: Trail, path: Int[Array, "B P"], count: Int[Array, " B"]) -> TargetCache:
    """The next cache: nodes `path[b, :count[b]]` of the trail, after what is committed already.

    path holds node indices along one root path, in order; entries from `count` on may be anything
    in range (zeros are written for them, beyond the new length). count 0 leaves a row as it was.
    """
    with jax.named_scope("commit"):
        layers = tuple(
            commit_layer(layer, left, path, count, cache.length)
            for layer, left in zip(cache.layers, trail, strict=True)
        )
        return TargetCache(layers, cache.length + count)


def commit_layer(
    layer: KVCache | RecurrentState,
    left: KVCache | Tape | States,
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
) -> KVCache | RecurrentState:
    """One layer of `commit`: layer-segmented prefill goes through the prompt layer by layer."""
    if isinstance(layer, KVCache):
        assert isinstance(left, KVCache)
        nodes = path[:, None, :, None]
        rows = KVCache(jnp.take_along_axis(left.k, nodes, 2), jnp.take_along_axis(left.v, nodes, 2))
        return _append(layer, _first(rows, count), length)
    assert not isinstance(left, KVCache)
    conv = _shift(layer.conv, _take(left.conv, path), count)
    if isinstance(left, States):
        last = _take(path, jnp.maximum(count - 1, 0)[:, None])
        s = jnp.where((count > 0)[:, None, None, None], _take(left.s, last)[:, 0], layer.s)
        return RecurrentState(s, conv)
    return RecurrentState(_replay_tape(layer.s, left, path, count), conv)


def _replay_tape(
    s: Float[Array, "B Hv U W"], tape: Tape, path: Int[Array, "B P"], count: Int[Array, " B"]
) -> Float[Array, "B Hv U W"]:
    """The state after node path[count - 1]: one masked matmul per head."""
    k, delta, decay = (_take(x, path) for x in (tape.k, tape.delta, tape.decay))
    kept = (jnp.arange(path.shape[1])[None] < count[:, None])[:, :, None]
    end = jnp.take_along_axis(decay, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    # The exponent is masked before exp: other nodes' are positive and can overflow.
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, end - decay, 0.0)), 0.0)
    delta = jnp.where(kept[..., None], weight[..., None] * delta, 0.0)
    k = jnp.repeat(jnp.where(kept[..., None], k, 0.0), delta.shape[2] // k.shape[2], axis=2)
    grown = jnp.einsum("bphu,bphw->bhuw", k, delta, precision=lax.Precision.HIGHEST)
    through = jnp.where((count > 0)[:, None], jnp.exp(jnp.where((count > 0)[:, None], end[:, 0], 0.0)), 1.0)
    return through[:, :, None, None] * s + grown


def _shift(
    conv: Float[Array, "B w ch"], inputs: Float[Array, "B P ch"], count: Int[Array, " B"]
) -> Float[Array, "B w ch"]:
    """The last inputs once the first `count` of `inputs` have followed."""
    index = count[:, None] + jnp.arange(conv.shape[1])[None]
    return _take(jnp.concatenate([conv, inputs.astype(conv.dtype)], axis=1), index)


def _take(x: Array, nodes: Int[Array, "B P"]) -> Array:
    """x[b, nodes[b]]"""
    return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *(1,) * (x.ndim - 2)), axis=1)


def extend_context(cache: DraftCache, rows: tuple[KVCache, ...], count: Int[Array, " B"]) -> DraftCache:
    """The draft's context grown by the first `count[b]` of `rows`."""
    ring = cache.ring
    if ring is not None and rows[0].slots > ring.rows:
        raise ConfigError(
            f"{rows[0].slots} rows at once do not fit a draft context that was made for {ring.rows} "
            f"beside its window of {ring.window}"
        )
    write = _append if ring is None else partial(_append_around, ring)
    layers = (
        write(old, _first(new, count), cache.length) for old, new in zip(cache.layers, rows, strict=True)
    )
    return dataclasses.replace(cache, layers=tuple(layers), length=cache.length + count)


def _first(rows: KVCache, count: Int[Array, " B"]) -> KVCache:
    """The first `count[b]` rows, then zeros: what is beyond may be NaN, and slots that nobody may see must be
    finite (layers.attend)."""
    kept = (jnp.arange(rows.slots)[None] < count[:, None])[:, None, :, None]
    return jax.tree.map(lambda x: jnp.where(kept, x, jnp.zeros((), x.dtype)), rows)


def _append(old: KVCache, new: KVCache, at: Int[Array, " B"]) -> KVCache:
    write = jax.vmap(lambda buffer, rows, start: lax.dynamic_update_slice(buffer, rows, (0, start, 0)))
    return KVCache(write(old.k, new.k, at), write(old.v, new.v, at))


def _append_around(ring: Ring, old: KVCache, new: KVCache, at: Int[Array, " B"]) -> KVCache:
    slots = (at[:, None] + jnp.arange(new.slots, dtype=jnp.int32)[None]) % ring.slots
    write = jax.vmap(lambda buffer, rows, slot: buffer.at[:, slot].set(rows, unique_indices=True))
    return KVCache(write(old.k, new.k, slots), write(old.v, new.v, slots))


# --- trails ---------------------------------------------------------------------------------------------


def pad_trail(trail: Trail, rows: int) -> Trail:
    """The trail with `rows` more nodes, which no path names: branches of different block sizes return one
    shape."""

    def wider(left: KVCache | Tape | States) -> KVCache | Tape | States:
        axis = 2 if isinstance(left, KVCache) else 1
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, rows if i == axis else 0) for i in range(x.ndim)]), left
        )

    return tuple(wider(left) for left in trail) if rows else trail


def join_trails(trails: list[Trail]) -> Trail:
    """The trail of a chain whose nodes were forwarded one after the other, each committed before the next."""

    def joined(*parts: KVCache | Tape | States) -> KVCache | Tape | States:
        axis = 2 if isinstance(parts[0], KVCache) else 1
        whole = jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=axis), *parts)
        # a tape's decay counts from the state before its own block
        if isinstance(whole, Tape):
            return dataclasses.replace(whole, decay=jnp.cumsum(whole.decay, axis=1))
        return whole

    return tuple(joined(*parts) for parts in zip(*trails, strict=True))


# --- room -----------------------------------------------------------------------------------------------


def prefix(cache: Cache, slots: int) -> Cache:
    """A view for reading: the first `slots` slots of every attention layer. Attention costs what it reads,
    so the caller passes the shortest prefix that covers the longest committed row."""
    if cache.slots <= slots:
        return cache
    return _resize(cache, lambda buffer: buffer[:, :, :slots])


def grow(cache: Cache, slots: int) -> Cache:
    """The same cache with room for `slots` positions (a host function, between calls)."""
    if isinstance(cache, DraftCache) and cache.ring is not None:
        slots = min(slots, cache.ring.slots)
    extra = max(0, slots - cache.slots)
    return _resize(cache, lambda buffer: jnp.pad(buffer, ((0, 0), (0, 0), (0, extra), (0, 0))))


def prefix_layer(layer: KVCache | RecurrentState, slots: int) -> KVCache | RecurrentState:
    return _resize_layer(layer, lambda buffer: buffer[:, :, :slots])


def _resize(cache: Cache, change: Callable[[Array], Array]) -> Cache:
    layers: Any = tuple(_resize_layer(layer, change) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


def _resize_layer(
    layer: KVCache | RecurrentState, change: Callable[[Array], Array]
) -> KVCache | RecurrentState:
    return KVCache(change(layer.k), change(layer.v)) if isinstance(layer, KVCache) else layer


def cache_bytes(config: TargetConfig | DraftConfig, batch: int, slots: int, itemsize: int) -> int:
    """2 * K * H values a position and attention layer; a recurrent layer's state whatever the length."""
    recurrent = sum(kind == RECURRENT for kind in config.layer_types)
    attention = 2 * batch * config.num_kv_heads * slots * config.head_dim * itemsize
    total = (config.num_layers - recurrent) * attention
    if isinstance(config, TargetConfig) and config.recurrent is not None:
        r = config.recurrent
        state = 4 * r.value_heads * r.key_dim * r.value_dim + (r.conv_width - 1) * r.channels * itemsize
        total += recurrent * batch * state
    return total


def trail_bytes(config: TargetConfig, batch: int, rows: int, itemsize: int, rollback: str = "tape") -> int:
    """What a verify of `rows` nodes leaves behind until it is committed. rollback: "tape" or "states"."""
    total = cache_bytes(config, batch, rows, itemsize) - cache_bytes(config, batch, 0, itemsize)
    if (r := config.recurrent) is not None:
        tape = r.key_heads * r.key_dim + r.value_heads * (r.value_dim + 1)
        values = tape if rollback == "tape" else r.value_heads * r.key_dim * r.value_dim
        layers = sum(kind == RECURRENT for kind in config.layer_types)
        total += layers * batch * rows * (4 * values + r.channels * itemsize)
    return total
