"""The rounds of decode.py from Python: to look inside, to stream, for models in pieces, and for every debugging mode.

`generate_stepwise` runs the same programs as the compiled loop, one round a call, or the pieces of a round one after
the other, each where its arrays are. What only it has: a draft on another device and embeddings on the host
(placement.py), a policy that is any Python object, and sequential verify, the explicit bonus and replay, each the
slow reference of what the compiled loop does at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.block import Block, chain_block
from dflash_jax.buckets import prefixes
from dflash_jax.cache import join_trails
from dflash_jax.config import ConfigError
from dflash_jax.decode import (
    commit_step,
    denoise_step,
    embed_step,
    extend_step,
    first_step,
    judge_step,
    pick_step,
    round_step,
    verify_step,
    write_step,
)
from dflash_jax.placement import follow
from dflash_jax.policy import Fixed
from dflash_jax.rounds import check, confidence, masked
from dflash_jax.state import Models, Options, RoundState, RoundTrace
from dflash_jax.targets import TargetOutput


def generate_stepwise(
    models: Models,
    state: RoundState,
    options: Options,
    *,
    policy: Any = None,
    verify: Literal["batched", "sequential"] = "batched",
    bonus: Literal["implicit", "explicit"] = "implicit",
) -> Iterator[tuple[RoundState, RoundTrace]]:
    """Yields (state, trace) after each round.

    policy: any object with `init`, `update`, `choose` and `sizes`, called on the host.
    verify "sequential": one-row forwards along the chain, the debugging reference of batched verify.
    bonus "explicit": the round's last token is forwarded at once; that adds a forward (and the
    token it yields), not a count to tau.
    options.rollback "replay": the old cache is the snapshot, and the accepted tokens are forwarded
    again one by one, the debugging reference of selection.
    """
    if verify == "sequential" and options.tree is not None:
        raise ConfigError("verify 'sequential' goes along a chain: it cannot verify a tree")
    chooser, p = policy, policy.init() if policy is not None else None
    replays = options.rollback == "replay"
    options = dataclasses.replace(options, rollback="tape") if replays else options
    while not bool(jnp.all(state.done)):
        now, before = options, state
        if chooser is not None:
            size = int(chooser.sizes[int(chooser.choose(p))])
            now = dataclasses.replace(
                options, policy=Fixed(size, options.tree.budget + 1 if options.tree else 0)
            )
            state = dataclasses.replace(state, policy=())
        if verify == "sequential" or models.in_pieces:
            state, trace = _round(models, state, now, verify)
        else:
            state, trace = round_step(models, state, now)
        if chooser is not None:
            p = chooser.update(p, trace.seen)
        state = _replayed(models, before, state, trace, options) if replays else state
        yield state, trace
        if bonus == "explicit" and not bool(jnp.all(state.done)):
            before = state
            state, trace = _round(models, state, options, bonus=True)
            state = _replayed(models, before, state, trace, options) if replays else state
            yield state, trace


def _round(
    models: Models, state: RoundState, options: Options, verify: str = "batched", bonus: bool = False
) -> tuple[RoundState, RoundTrace]:
    """rounds.round in pieces. All but the draft's pass and its context is the target's. bonus: of the anchor
    alone."""
    check(models, state, options)
    policy, slots, context = options.policy, _readable(state), state.draft_cache
    state = dataclasses.replace(state, draft_cache=None)
    size = 1 if bonus else policy.sizes[int(policy.choose(state.policy))]
    hidden = None
    if size > 1 and models.draft is not None:
        assert context is not None
        embeddings = _embeddings(models, state.anchor, size, context.length)
        hidden = follow(denoise_step(models.of_draft, context, embeddings, slots), state.anchor)
    drafted = pick_step(models.of_target, state, options, size, hidden)
    nodes = 1 if bonus else policy.rows[int(policy.choose(state.policy, confidence(state, drafted)))]
    drafted = first_step(drafted, nodes)
    look = _one_by_one if verify == "sequential" else _at_once
    output = look(models, state, drafted.candidates.block, slots, options)
    verified = judge_step(state, drafted, output, options)
    state, trace = write_step(models.of_target, state, verified, options, counted=not bonus)
    if context is not None and models.draft is not None:
        features, kept = follow(verified.features, context.length), follow(trace.kept, context.length)
        context = extend_step(models.of_draft, context, features, kept)
    return dataclasses.replace(state, draft_cache=context), trace


def _readable(state: RoundState) -> int:
    """The compiled cache prefix that covers what is committed and one block more."""
    slots = state.target_cache.slots
    longest = int(jnp.max(jnp.where(state.done, 0, state.target_cache.length))) + state.largest
    return next((n for n in prefixes(slots) if n >= longest), slots)


def _embeddings(models: Models, anchor: Array, size: int, like: Array) -> Float[Array, "B C D"]:
    """Of the block that the draft fills, beside `like`."""
    found = models.look_up(masked(models, anchor, size), like)
    return follow(embed_step(models.of_target, anchor, size), like) if found is None else found


def _at_once(models: Models, state: RoundState, block: Block, slots: int, options: Options) -> TargetOutput:
    embeddings = models.look_up(block.tokens, state.anchor)
    return verify_step(models.of_target, state, block, slots, options, embeddings)


def _one_by_one(
    models: Models, state: RoundState, block: Block, slots: int, options: Options
) -> TargetOutput:
    """The nodes of a chain, each committed before the next."""
    tokens, outputs = block.tokens, []
    ones = jnp.ones(tokens.shape[0], jnp.int32)
    for i in range(block.size):
        output = _at_once(models, state, chain_block(tokens[:, i : i + 1]), slots, options)
        cache = commit_step(state.target_cache, output.trail, ones[:, None] * 0, ones)
        state = dataclasses.replace(state, target_cache=cache)
        outputs.append(output)
    logits = jnp.concatenate([o.logits for o in outputs if o.logits is not None], axis=1)
    features = jnp.concatenate([o.features for o in outputs], axis=1)
    return TargetOutput(logits, features, join_trails([o.trail for o in outputs]))


def _replayed(
    models: Models, before: RoundState, after: RoundState, trace: RoundTrace, options: Options
) -> RoundState:
    """`after` with the cache that forwarding the kept tokens one by one from `before` gives."""
    tokens = jnp.take_along_axis(trace.block.tokens, trace.acceptance.path, axis=1)
    step, slots = dataclasses.replace(before, draft_cache=None), before.target_cache.slots
    for i in range(int(np.asarray(trace.kept).max())):
        output = _at_once(models, step, chain_block(tokens[:, i : i + 1]), slots, options)
        count = (trace.kept > i).astype(jnp.int32)
        cache = commit_step(step.target_cache, output.trail, jnp.zeros_like(tokens[:, :1]), count)
        step = dataclasses.replace(step, target_cache=cache)
    return dataclasses.replace(after, target_cache=step.target_cache)
