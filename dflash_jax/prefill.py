"""Starting a generation: what decode.prefill compiles. Pure functions.

A piece of the prompt is a chain block that is committed whole, so prefill is a verify that cannot fail. Two
orders give the same caches: *token-segmented*, each chunk through all layers before the next chunk; and
*layer-segmented*, all chunks through one layer before the next layer, which reads every weight once for the
whole prompt and keeps the whole prompt's residuals instead (Luce's megakernel prefill; docs/hybrid.md has
the memory of both).
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block, chain_block
from dflash_jax.cache import (
    DraftCache,
    KVCache,
    RecurrentState,
    States,
    Tape,
    TargetCache,
    commit,
    commit_layer,
    prefix,
    prefix_layer,
)
from dflash_jax.config import TargetConfig
from dflash_jax.sampling import Sampling, choose, log_probability
from dflash_jax.state import RUNNING, Models, Options, RoundState, cut, emit
from dflash_jax.targets import Decoder
from dflash_jax.targets.decoder import Remember


def _steps(width: int, count: Int[Array, " B"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (count.shape[0], width))


def _chunk(tokens: Int[Array, "B T"], count: Int[Array, " B"]) -> Block:
    return chain_block(tokens, valid=_steps(tokens.shape[1], count) < count[:, None])


# --- token-segmented ------------------------------------------------------------------------------------


def whole_chunk(
    models: Models,
    target: TargetCache,
    logits: Float[Array, "B 1 V"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    slots: int,
    embeddings: Float[Array, "B T D"] | None = None,
) -> tuple[TargetCache, Float[Array, "B 1 V"], Float[Array, "B T PD"]]:
    """Commit count[b] rows of the chunk; logits keeps those of each row's last position so far. Also the rows'
    features. embeddings: see Decoder.__call__."""
    output = models.run_target(
        _chunk(tokens, count), prefix(target, slots), models.taps, logits="last", embeddings=embeddings
    )
    logits = jnp.where((count > 0)[:, None, None], output.logits, logits)
    return commit(target, output.trail, _steps(tokens.shape[1], count), count), logits, output.features


def extend_chunk(
    models: Models, draft: DraftCache, features: Float[Array, "B T PD"], count: Int[Array, " B"]
) -> DraftCache:
    return cast(DraftCache, models.run_draft(draft, features, count, method="extend"))


# --- layer-segmented ------------------------------------------------------------------------------------


def alike(config: TargetConfig) -> list[int]:
    """For each layer the first one that differs from it in its parameters' values only: one program each."""
    first: dict[tuple, int] = {}
    routed = config.moe.layers if config.moe else (False,) * config.num_layers
    return [
        first.setdefault((config.layer_types[i], config.window(i), routed[i]), i)
        for i in range(config.num_layers)
    ]


def embed_chunk(
    models: Models,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    embeddings: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"]:
    x = models.run_target(tokens, method="embed") if embeddings is None else embeddings
    return jnp.where((_steps(tokens.shape[1], count) < count[:, None])[..., None], x, jnp.zeros((), x.dtype))


def one_layer(
    target: Decoder,
    index: int,
    params: Any,
    x: Float[Array, "B T D"],
    block: Block,
    cache: KVCache | RecurrentState,
    length: Int[Array, " B"],
    slots: int,
    trail: Remember = "tape",
) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
    """A block through one layer, and what that leaves behind. params: that layer's; index: of a layer like
    it (see alike)."""
    view = target.apply({}, block, length, slots, method="view")
    own = {"params": {f"layers_{index}": params}}
    read = prefix_layer(cache, slots)
    return cast(Any, target.apply(own, index, x, view, read, trail, method="run_layer"))


def layer_chunk(
    target: Decoder,
    index: int,
    params: Any,
    x: Float[Array, "B T D"],
    cache: KVCache | RecurrentState,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    slots: int,
) -> tuple[Float[Array, "B T D"], KVCache | RecurrentState]:
    """One chunk through one layer, and the layer's next cache."""
    steps = _steps(x.shape[1], count)
    x, left = one_layer(target, index, params, x, _chunk(steps, count), cache, length, slots)
    return x, commit_layer(cache, left, steps, count, length)


def last_logits(
    models: Models, x: Float[Array, "B T D"], count: Int[Array, " B"], logits: Float[Array, "B 1 V"]
) -> Float[Array, "B 1 V"]:
    block = _chunk(_steps(x.shape[1], count), count)
    new = models.run_target(x, block, "last", method="read_out")
    return jnp.where((count > 0)[:, None, None], new, logits)


# --- the first token ------------------------------------------------------------------------------------


def begin(
    target: TargetCache,
    logits: Float[Array, "B 1 V"],
    limit: Int[Array, " B"],
    seeds: Int[Array, " B"],
    stops: Int[Array, " n"],
    how: Sampling,
    options: Options,
    budget: int,
) -> RoundState:
    """The first state; its draft's context is for the caller to put in."""
    batch = limit.shape[0]
    anchor = choose(logits, how, seeds, target.length[:, None])
    logprobs = log_probability(logits, anchor) if options.logprobs else jnp.zeros((batch, 1))
    state = RoundState(
        target_cache=target,
        draft_cache=None,
        anchor=anchor[:, 0],
        tokens=jnp.zeros((batch, budget + options.largest), jnp.int32),
        logprobs=jnp.zeros((batch, budget + options.largest), jnp.float32),
        emitted=jnp.zeros(batch, jnp.int32),
        limit=limit,
        committed=jnp.zeros((batch, budget), jnp.int32),
        sizes=jnp.zeros(budget, jnp.int32),
        nodes=jnp.zeros(budget, jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        reason=jnp.full(batch, RUNNING, jnp.int32),
        seeds=seeds,
        stops=stops,
        policy=options.policy.init(),
        sampling=how,
    )
    kept, reason = cut(state, anchor, jnp.ones(batch, jnp.int32))
    return dataclasses.replace(
        state,
        tokens=emit(state.tokens, anchor, state.emitted),
        logprobs=emit(state.logprobs, logprobs, state.emitted),
        emitted=kept,
        reason=reason,
    )
