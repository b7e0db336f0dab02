"""One round of decoding: what decode.py compiles. Pure functions of a state.

    propose   the draft fills [anchor, MASK, ...] in one pass, seeing every committed position
    verify    the target looks at the whole block in one pass; nothing is written
    judge     walk from the anchor while the target agrees
    write     select the accepted rows into the next caches; the target's own choice after them is
              the next anchor ("implicit bonus": emitted now, forwarded in the next round)

The candidates are a chain or a tree (tree.py). `round` is all of it; the pieces serve whoever runs them one by one
(stepwise.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block
from dflash_jax.buckets import prefixes
from dflash_jax.cache import DraftCache, Trail, commit, pad_trail, prefix
from dflash_jax.config import ConfigError, check_block_size
from dflash_jax.policy import Seen
from dflash_jax.prefill import extend_chunk
from dflash_jax.sampling import Acceptance, accept, log_probability, most_likely, propose_samples
from dflash_jax.state import Models, Options, RoundState, RoundTrace, cut, emit
from dflash_jax.targets import TargetOutput
from dflash_jax.tree import (
    Candidates,
    anchor_alone,
    draft_chain,
    draft_tree,
    first_nodes,
    pad_candidates,
    pad_rows,
)


@struct.dataclass
class Drafted:
    """The draft's half of a round, padded to the largest sizes. probs [B, C-1, V]: what sampled candidates
    were drawn from, None for the draft's best. size: the block size."""

    candidates: Candidates
    probs: Array | None
    size: Array


@struct.dataclass
class Verified:
    """The target's half, padded to the most nodes. features: of the accepted path. drafted, nodes: the block size,
    and how many nodes were looked at; expected [B]: tokens that the draft promised of them."""

    block: Block
    acceptance: Acceptance
    logprobs: Array
    features: Array
    trail: Trail
    drafted: Array
    nodes: Array
    expected: Array


def round(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    """Propose, verify, accept, commit."""
    if models.table is not None:
        raise ConfigError("the embedding table is on the host: only generate_stepwise looks it up there")
    check(models, state, options)
    policy = options.policy
    draft = partial(propose, models, state, options)
    drafted = _compiled_for(state, policy.sizes, policy.choose(state.policy), draft)
    verify = partial(_verify, models, state, drafted, options)
    chosen = policy.choose(state.policy, confidence(state, drafted))
    verified = _compiled_for(state, policy.rows, chosen, verify)
    return write(models, state, verified, options)


def confidence(state: RoundState, drafted: Drafted) -> Float[Array, "B T"]:
    """What a policy chooses by once the draft has run."""
    return jnp.where(state.done[:, None], -jnp.inf, drafted.candidates.weight)


def _compiled_for(state: RoundState, sizes: tuple[int, ...], chosen: Array | int, body: Callable) -> Any:
    """body(size, slots) for the chosen size and the shortest cache prefix that covers what is committed."""
    compiled = prefixes(state.target_cache.slots)
    longest = jnp.max(jnp.where(state.done, 0, state.target_cache.length))
    shortest = jnp.sum(longest > jnp.asarray(compiled), dtype=jnp.int32)
    branches = [partial(body, size, slots) for size in sizes for slots in compiled]
    return lax.switch(chosen * len(compiled) + shortest, branches)


def check(models: Models, state: RoundState, options: Options) -> None:
    """Of static choices, so while tracing: what would clamp, degrade or divide by zero is refused."""
    if options.largest > state.largest:
        raise ConfigError(
            f"block size {options.largest} does not fit: the state was allocated for {state.largest}"
        )
    if options.rollback == "replay":
        raise ConfigError("rollback 'replay' is a debugging mode: only generate_stepwise has it")
    if options.proposal == "sample" and state.sampling.greedy:
        raise ConfigError("proposal 'sample' needs a temperature above 0: greedy decoding has one answer")
    if options.proposal == "sample" and len(options.policy.sizes) + len(options.policy.rows) > 2:
        raise ConfigError(
            "proposal 'sample' needs a fixed policy: candidates that are left out for what they are "
            "are no sample of the draft any more, and acceptance would be biased"
        )
    if models.draft is not None and options.largest > 1:
        check_block_size(models.draft.config, options.largest)
    if options.tree is not None:
        if options.proposal == "sample":
            raise ConfigError(
                "proposal 'sample' is for chains: min(1, p/q) over a tree of the best is biased"
            )
        options.tree.check_block(options.largest)
    most = options.largest if options.tree is None else options.tree.budget + 1
    if options.nodes > most:
        raise ConfigError(f"{options.nodes} nodes are to be verified, but the draft proposes {most}")


def propose(models: Models, state: RoundState, options: Options, size: int, slots: int) -> Drafted:
    """What to verify: the anchor and its candidates, all from one pass of the draft."""
    with jax.named_scope("propose"):
        hidden = None
        if size > 1 and models.draft is not None:
            assert state.draft_cache is not None
            hidden = denoise(models, state.draft_cache, embed(models, state.anchor, size), slots)
        return pick(models, state, options, size, hidden)


def masked(models: Models, anchor: Int[Array, " B"], size: int) -> Int[Array, "B C"]:
    """The block that the draft fills: [anchor, MASK, ...]."""
    assert models.draft is not None
    masks = jnp.full((anchor.shape[0], size - 1), models.draft.config.mask_token_id, jnp.int32)
    return jnp.concatenate([anchor[:, None], masks], axis=1)


def embed(models: Models, anchor: Int[Array, " B"], size: int) -> Float[Array, "B C D"]:
    return cast(Array, models.run_target(masked(models, anchor, size), method="embed"))


def denoise(
    models: Models, context: DraftCache, embeddings: Float[Array, "B C D"], slots: int
) -> Float[Array, "B c D"]:
    return cast(Array, models.run_draft(prefix(context, slots), embeddings, method="propose"))


def pick(
    models: Models, state: RoundState, options: Options, size: int, hidden: Float[Array, "B c D"] | None
) -> Drafted:
    """Candidates from the draft's hidden states, through the target's head; None: the anchor alone."""
    candidates, probs = anchor_alone(state.anchor, chain=options.tree is None), cast(Array | None, None)
    if hidden is not None:
        logits = models.draft_logits(hidden)
        if options.proposal == "sample":
            positions = state.target_cache.length[:, None] + jnp.arange(1, size)[None]
            tokens, probs = propose_samples(logits, state.sampling, state.seeds, positions)
            beyond = models.target.config.vocab_size - models.choices
            probs = jnp.pad(probs, ((0, 0), (0, options.largest - size), (0, beyond)))
            candidates = draft_chain(state.anchor, logits, tokens)
        elif options.tree is not None:
            candidates = draft_tree(state.anchor, logits, options.tree)
        else:
            candidates = draft_chain(state.anchor, logits, most_likely(logits))
    return Drafted(pad_candidates(candidates, options.nodes), probs, jnp.asarray(size, jnp.int32))


def _verify(
    models: Models, state: RoundState, drafted: Drafted, options: Options, nodes: int, slots: int
) -> Verified:
    drafted = first_drafted(drafted, nodes)
    output = verify(models, state, drafted.candidates.block, slots, options)
    return judge(state, drafted, output, options)


def first_drafted(drafted: Drafted, nodes: int) -> Drafted:
    probs = None if drafted.probs is None else drafted.probs[:, : nodes - 1]
    return Drafted(first_nodes(drafted.candidates, nodes), probs, drafted.size)


def verify(
    models: Models,
    state: RoundState,
    block: Block,
    slots: int,
    options: Options,
    embeddings: Float[Array, "B T D"] | None = None,
) -> TargetOutput:
    """The target's view of every node of the block, in one forward. embeddings: see Decoder.__call__."""
    with jax.named_scope("verify"):
        cache = prefix(state.target_cache, slots)
        remember = "states" if options.rollback == "states" else "tape"
        return models.run_target(block, cache, models.taps, embeddings=embeddings, trail=remember)


def judge(state: RoundState, drafted: Drafted, output: TargetOutput, options: Options) -> Verified:
    assert output.logits is not None
    block = drafted.candidates.block
    positions = state.target_cache.length[:, None] + block.depth + 1
    accepted = accept(block, output.logits, state.sampling, state.seeds, positions, drafted.probs)
    path, tokens = accepted.path[:, : options.largest], accepted.tokens[:, : options.largest]
    logprobs = jnp.zeros(tokens.shape, jnp.float32)
    if options.logprobs:
        rows = jnp.take_along_axis(output.logits, path[:, :, None], axis=1)
        logprobs = log_probability(rows, tokens)
    extra, short = options.nodes - block.size, options.largest - path.shape[1]
    return Verified(
        block=pad_candidates(drafted.candidates, options.nodes).block,
        acceptance=Acceptance(pad_rows(path, short), accepted.count, pad_rows(tokens, short),
                              pad_rows(accepted.choices, extra)),
        logprobs=pad_rows(logprobs, short),
        features=pad_rows(jnp.take_along_axis(output.features, path[:, :, None], axis=1), short),
        trail=pad_trail(output.trail, extra),
        drafted=drafted.size,
        nodes=jnp.asarray(block.size, jnp.int32),
        expected=jnp.exp(drafted.candidates.weight).sum(-1),
    )  # fmt: skip


def write(
    models: Models, state: RoundState, verified: Verified, options: Options, counted: bool = True
) -> tuple[RoundState, RoundTrace]:
    """The rest of a round: cut at a stop token or the budget, commit the path, emit its tokens."""
    accepted = verified.acceptance
    kept, reason = cut(state, accepted.tokens, accepted.count)
    last = jnp.take_along_axis(accepted.tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    cache = commit(state.target_cache, verified.trail, accepted.path, kept)
    context = state.draft_cache
    if models.draft is not None and context is not None:
        context = extend_chunk(models, context, verified.features, kept)
    state = dataclasses.replace(
        state,
        target_cache=cache,
        draft_cache=context,
        anchor=jnp.where(kept > 0, last, state.anchor),
        tokens=emit(state.tokens, accepted.tokens, state.emitted),
        logprobs=emit(state.logprobs, verified.logprobs, state.emitted),
        emitted=state.emitted + kept,
        reason=reason,
    )
    seen = Seen(kept, verified.drafted, verified.nodes, verified.expected)
    if counted:
        deepest = jnp.where(verified.block.valid & (kept > 0)[:, None], verified.block.depth, 0).max()
        state = dataclasses.replace(
            state,
            committed=lax.dynamic_update_slice(state.committed, kept[:, None], (0, state.rounds)),
            sizes=lax.dynamic_update_slice(state.sizes, deepest[None] + 1, (state.rounds,)),
            nodes=lax.dynamic_update_slice(state.nodes, verified.nodes[None], (state.rounds,)),
            rounds=state.rounds + 1,
            policy=options.policy.update(state.policy, seen),
        )
    return state, RoundTrace(verified.block, accepted, seen)
