"""The rounds of decode.py from Python: to look inside, to stream, and for every debugging mode.

`generate_stepwise` runs the same programs as the compiled loop, one round a call. What only it has: a policy
that is any Python object, sequential verify, the explicit bonus and replay, each the slow reference of
what the compiled loop does at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from dflash_jax.block import chain_block
from dflash_jax.cache import join_trails
from dflash_jax.config import ConfigError
from dflash_jax.decode import commit_step, judge_step, propose_step, round_step, verify_step, write_step
from dflash_jax.policy import Fixed
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
        if verify == "sequential":
            state, trace = _sequential_round(models, state, now)
        else:
            state, trace = round_step(models, state, now)
        if chooser is not None:
            p = chooser.update(p, trace.seen)
        state = _replayed(models, before, state, trace, options) if replays else state
        yield state, trace
        if bonus == "explicit" and not bool(jnp.all(state.done)):
            before = state
            state, trace = _bonus(models, state, options)
            state = _replayed(models, before, state, trace, options) if replays else state
            yield state, trace


def _sequential_round(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    slots = state.target_cache.slots
    size = options.policy.sizes[int(options.policy.choose(state.policy))]
    drafted = propose_step(models, state, dataclasses.replace(options, policy=Fixed(size)), size, slots)
    tokens = drafted.candidates.block.tokens
    step = state
    outputs: list[TargetOutput] = []
    for i in range(size):
        output = verify_step(models, step, chain_block(tokens[:, i : i + 1]), slots, options)
        ones = jnp.ones(tokens.shape[0], jnp.int32)
        cache = commit_step(step.target_cache, output.trail, ones[:, None] * 0, ones)
        step = dataclasses.replace(step, target_cache=cache)
        outputs.append(output)
    logits = jnp.concatenate([o.logits for o in outputs if o.logits is not None], axis=1)
    features = jnp.concatenate([o.features for o in outputs], axis=1)
    output = TargetOutput(logits, features, join_trails([o.trail for o in outputs]))
    return write_step(models, state, judge_step(state, drafted, output, options), options)


def _bonus(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    slots = state.target_cache.slots
    drafted = propose_step(models, state, dataclasses.replace(options, policy=Fixed(1)), 1, slots)
    output = verify_step(models, state, drafted.candidates.block, slots, options)
    return write_step(models, state, judge_step(state, drafted, output, options), options, counted=False)


def _replayed(
    models: Models, before: RoundState, after: RoundState, trace: RoundTrace, options: Options
) -> RoundState:
    """`after` with the cache that forwarding the kept tokens one by one from `before` gives."""
    tokens = jnp.take_along_axis(trace.block.tokens, trace.acceptance.path, axis=1)
    step, slots = before, before.target_cache.slots
    for i in range(int(trace.kept.max())):
        output = verify_step(models, step, chain_block(tokens[:, i : i + 1]), slots, options)
        count = (trace.kept > i).astype(jnp.int32)
        cache = commit_step(step.target_cache, output.trail, jnp.zeros_like(tokens[:, :1]), count)
        step = dataclasses.replace(step, target_cache=cache)
    return dataclasses.replace(after, target_cache=step.target_cache)
