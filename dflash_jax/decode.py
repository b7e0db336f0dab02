"""Speculative decoding with a block-diffusion draft: the algorithm (DFlash 3.1) and its loops.

One round, a pure function of a state:

    propose   the draft fills [anchor, MASK, ...] in one pass, seeing every committed position
    verify    the target looks at the whole block in one pass; nothing is written
    accept    walk from the anchor while the target agrees
    commit    select the accepted rows into the next caches; the target's own choice after them is
              the next anchor ("implicit bonus": emitted now, forwarded in the next round)

The candidates are a chain or a tree (tree.py). `generate` is `lax.while_loop(round)` on the device;
stepwise.py calls the same functions from Python, to look inside, to stream, and for the debugging modes.
Autoregressive decoding is a round whose block is the anchor alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from dflash_jax.block import Block
from dflash_jax.buckets import bucket, check_prompts, chunks_of, prefixes, stop_array
from dflash_jax.cache import (
    DraftCache,
    TargetCache,
    Trail,
    commit,
    commit_layer,
    draft_cache,
    grow,
    pad_trail,
    prefix,
    target_cache,
)
from dflash_jax.config import ConfigError, check_block_size
from dflash_jax.generation import Generation, finish
from dflash_jax.policy import Seen
from dflash_jax.prefill import (
    alike,
    begin,
    embed_chunk,
    extend_chunk,
    last_logits,
    layer_chunk,
    one_layer,
    whole_chunk,
)
from dflash_jax.sampling import (
    Acceptance,
    Sampling,
    accept,
    log_probability,
    most_likely,
    propose_samples,
    sampling,
)
from dflash_jax.state import AUTOREGRESSIVE, Models, Options, RoundState, RoundTrace, cut, emit
from dflash_jax.targets import TargetOutput
from dflash_jax.tree import (
    Candidates,
    anchor_alone,
    draft_chain,
    draft_tree,
    first_nodes,
    pad_candidates,
    pad_rows,
    top_k,
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
    """The target's half, padded to the most nodes. drafted, nodes: the block size, and how many nodes were looked
    at; expected [B]: tokens that the draft promised of them."""

    block: Block
    acceptance: Acceptance
    logprobs: Array
    features: Array
    trail: Trail
    drafted: Array
    nodes: Array
    expected: Array


# --- one round ----------------------------------------------------------------------------------------


def round(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    """Propose, verify, accept, commit."""
    _check(models, state, options)
    policy = options.policy
    draft = partial(_draft, models, state, options)
    drafted = _compiled_for(state, policy.sizes, policy.choose(state.policy), draft)
    confidence = jnp.where(state.done[:, None], -jnp.inf, drafted.candidates.weight)
    verify = partial(_verify, models, state, drafted, options)
    verified = _compiled_for(state, policy.rows, policy.choose(state.policy, confidence), verify)
    return _write(models, state, verified, options)


def _compiled_for(state: RoundState, sizes: tuple[int, ...], chosen: Array | int, body: Callable) -> Any:
    """body(size, slots) for the chosen size and the shortest cache prefix that covers what is committed."""
    compiled = prefixes(state.target_cache.slots, state.largest)
    longest = jnp.max(jnp.where(state.done, 0, state.target_cache.length))
    shortest = jnp.sum(longest > jnp.asarray(compiled), dtype=jnp.int32)
    branches = [partial(body, size, slots) for size in sizes for slots in compiled]
    return lax.switch(chosen * len(compiled) + shortest, branches)


def _check(models: Models, state: RoundState, options: Options) -> None:
    """While tracing: what would clamp, degrade or divide by zero is refused."""
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


def _draft(models: Models, state: RoundState, options: Options, size: int, slots: int) -> Drafted:
    candidates, probs = propose(models, state, options, size, slots)
    if probs is not None:
        probs = pad_rows(probs, options.largest - size)
    return Drafted(pad_candidates(candidates, options.nodes), probs, jnp.asarray(size, jnp.int32))


def propose(
    models: Models, state: RoundState, options: Options, size: int, slots: int
) -> tuple[Candidates, Float[Array, "B c V"] | None]:
    """What to verify: the anchor and its candidates, all from one pass of the draft."""
    if size == 1 or models.draft is None:
        return anchor_alone(state.anchor, chain=options.tree is None), None
    with jax.named_scope("propose"):
        draft, head = models.draft, partial(models.run_target, method="head")
        masks = jnp.full((state.anchor.shape[0], size - 1), draft.config.mask_token_id, jnp.int32)
        embeddings = models.run_target(
            jnp.concatenate([state.anchor[:, None], masks], axis=1), method="embed"
        )
        assert state.draft_cache is not None
        context = prefix(state.draft_cache, slots)
        hidden = models.run_draft(context, embeddings, method="propose")
        logits = draft.logits(hidden, head)
        if options.proposal == "sample":
            positions = state.target_cache.length[:, None] + jnp.arange(1, size)[None]
            tokens, probs = propose_samples(logits, state.sampling, state.seeds, positions)
            return draft_chain(state.anchor, logits, tokens), probs
        if options.tree is not None:
            return draft_tree(state.anchor, logits, options.tree), None
        return draft_chain(state.anchor, logits, most_likely(logits)), None


def _verify(
    models: Models, state: RoundState, drafted: Drafted, options: Options, nodes: int, slots: int
) -> Verified:
    candidates = first_nodes(drafted.candidates, nodes)
    probs = None if drafted.probs is None else drafted.probs[:, : nodes - 1]
    output = verify(models, state, candidates.block, slots, options)
    return _judge(state, Drafted(candidates, probs, drafted.size), output, options)


def verify(models: Models, state: RoundState, block: Block, slots: int, options: Options) -> TargetOutput:
    """The target's view of every node of the block, in one forward."""
    with jax.named_scope("verify"):
        cache = prefix(state.target_cache, slots)
        remember = "states" if options.rollback == "states" else "tape"
        return models.run_target(block, cache, models.taps, trail=remember)


def _judge(state: RoundState, drafted: Drafted, output: TargetOutput, options: Options) -> Verified:
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
        features=pad_rows(output.features, extra),
        trail=pad_trail(output.trail, extra),
        drafted=drafted.size,
        nodes=jnp.asarray(block.size, jnp.int32),
        expected=jnp.exp(drafted.candidates.weight).sum(-1),
    )  # fmt: skip


def _write(
    models: Models, state: RoundState, verified: Verified, options: Options, counted: bool = True
) -> tuple[RoundState, RoundTrace]:
    """The rest of a round: cut at a stop token or the budget, commit the path, emit its tokens."""
    accepted = verified.acceptance
    kept, reason = cut(state, accepted.tokens, accepted.count)
    last = jnp.take_along_axis(accepted.tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    cache = commit(state.target_cache, verified.trail, accepted.path, kept)
    context = state.draft_cache
    if models.draft is not None:
        features = jnp.take_along_axis(verified.features, accepted.path[:, :, None], axis=1)
        context = models.run_draft(context, features, kept, method="extend")
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


# --- the loops ----------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="options")
def generate(models: Models, state: RoundState, options: Options) -> RoundState:
    """Rounds until every row is done, as one program: no host sync inside."""
    return lax.while_loop(
        lambda state: ~jnp.all(state.done), lambda state: round(models, state, options)[0], state
    )


def generate_autoregressive(models: Models, state: RoundState, logprobs: bool = False) -> RoundState:
    """The baseline on the same machinery: rounds of one row, no draft."""
    options = Options(AUTOREGRESSIVE.policy, logprobs=logprobs)
    state = dataclasses.replace(state, draft_cache=None, policy=options.policy.init())
    return generate(models.without_draft(), state, options)


round_step = jax.jit(round, static_argnames="options")
# The parts of a round as programs of their own, for generate_stepwise and for timing.
propose_step = jax.jit(_draft, static_argnames=("options", "size", "slots"))
verify_step = jax.jit(verify, static_argnames=("slots", "options"))
judge_step = jax.jit(_judge, static_argnames="options")
write_step = jax.jit(_write, static_argnames=("options", "counted"))
commit_step = jax.jit(commit)
# What choosing a tree costs, for timing.
top_k_step = jax.jit(top_k, static_argnames="k")
tree_step = jax.jit(draft_tree, static_argnames="shape")
# One layer's share of them, for timing.
layer_step = jax.jit(one_layer, static_argnames=("target", "index", "slots", "trail"))
commit_layer_step = jax.jit(commit_layer)


# --- starting, continuing, reading ----------------------------------------------------------------------


def prefill(
    models: Models,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    max_new_tokens: int | Sequence[int],
    how: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    chunk_size: int = 512,
    order: Literal["tokens", "layers"] = "tokens",
    capacity: int | None = None,
    state: RoundState | None = None,
) -> RoundState:
    """Run the prompts through the target and emit the first token of each row.

    Chunks of at most chunk_size positions are chain blocks that are committed whole; any chunk size
    gives the same caches. order: "tokens" takes each chunk through all layers; "layers" takes all chunks
    through one layer before the next, and holds the whole prompt's residuals for that: B * prompt * (1 +
    taps) * D values. Rows may differ in length and budget. capacity: positions to allocate for
    prompt + budget (default: the next bucket), so that later calls of the same capacity do not
    compile again. state: continue this generation: its caches hold the conversation so far, prompts
    are what follows, and its anchor (emitted, not yet in a cache) goes first. `state` is not changed.

    Raises ConfigError before any work when a prompt is empty, an id is no embedding row, or prompt +
    budget exceed the capacity.
    """
    rows, limits = check_prompts(prompts, max_new_tokens, chunk_size, models.target.config.vocab_size)
    start = np.zeros(len(rows), np.int64)
    if state is not None:
        if state.anchor.shape[0] != len(rows):
            raise ConfigError(f"the state has {state.anchor.shape[0]} rows, but {len(rows)} prompts follow")
        start = np.asarray(state.target_cache.length, np.int64)
        rows = [[int(anchor), *row] for anchor, row in zip(np.asarray(state.anchor), rows, strict=True)]
    if len(seeds or rows) != len(rows):
        raise ConfigError(f"{len(seeds or ())} seeds for {len(rows)} prompts: one per row")
    lengths = np.array([len(row) for row in rows])
    needed = int((start + lengths + limits).max())
    if capacity is not None and needed > capacity:
        raise ConfigError(
            f"prompt and budget need {needed} positions, but the capacity is {capacity}: "
            "shorten the prompt, lower max_new_tokens or raise the capacity"
        )
    chunks = chunks_of(start, lengths, chunk_size)
    end = max(int(at.max()) + width for _, width, at in chunks)
    slots = max(bucket(capacity or needed) + options.largest, end)
    run = _run_chunks if order == "tokens" else _run_layers
    target, draft, logits = run(models, rows, chunks, *_caches(models, state, len(rows), slots))
    if state is not None:
        how = how or state.sampling
        seeds = np.asarray(state.seeds).tolist() if seeds is None else seeds
        stop_ids = stop_ids or np.asarray(state.stops).tolist()
    return _begin(
        target, draft, logits, jnp.asarray(limits, jnp.int32),
        jnp.asarray(range(len(rows)) if seeds is None else seeds, jnp.int32),
        stop_array(stop_ids), how or sampling(), options, bucket(int(limits.max())),
    )  # fmt: skip


def next_logits(
    models: Models, prompts: Sequence[Sequence[int]], chunk_size: int = 512
) -> Float[Array, "B V"]:
    """The target's logits after each prompt: to look at one choice again, for instance at a near-tie."""
    rows, _ = check_prompts(prompts, 1, chunk_size, models.target.config.vocab_size)
    chunks = chunks_of(np.zeros(len(rows), np.int64), np.array([len(row) for row in rows]), chunk_size)
    slots = bucket(max(int(at.max()) + width for _, width, at in chunks))
    alone = models.without_draft()
    return _run_chunks(alone, rows, chunks, *_caches(alone, None, len(rows), slots))[2][:, 0]


def _run_chunks(
    models: Models,
    rows: list[list[int]],
    chunks: list[tuple[int, int, np.ndarray]],
    target: TargetCache,
    draft: DraftCache | None,
) -> tuple[TargetCache, DraftCache | None, Float[Array, "B 1 V"]]:
    """Token-segmented: all layers for one chunk after the other; each reads the prefix that it needs."""
    slots = target.slots
    logits = jnp.zeros((len(rows), 1, models.target.config.vocab_size), jnp.float32)
    for first, width, at in chunks:
        tokens, count = _cut_chunk(rows, first, width)
        target, draft, logits = _whole_chunk(
            models, target, draft, logits, tokens, count, _readable(at, slots)
        )
    return target, draft, logits


def _run_layers(
    models: Models,
    rows: list[list[int]],
    chunks: list[tuple[int, int, np.ndarray]],
    target: TargetCache,
    draft: DraftCache | None,
) -> tuple[TargetCache, DraftCache | None, Float[Array, "B 1 V"]]:
    """Layer-segmented: all chunks for one layer after the other."""
    cut = [_cut_chunk(rows, first, width) for first, width, _ in chunks]
    streams = [_embed_chunk(models, tokens, count) for tokens, count in cut]
    tapped: dict[int, list[Array]] = {}
    layers = []
    for i, like in enumerate(alike(models.target.config)):
        layer, params = target.layers[i], models.target_params[f"layers_{i}"]
        for n, ((_, _, at), (_, count)) in enumerate(zip(chunks, cut, strict=True)):
            streams[n], layer = _layer_chunk(
                models.target, like, params, streams[n], layer,
                jnp.asarray(at, jnp.int32), count, _readable(at, target.slots),
            )  # fmt: skip
        layers.append(layer)
        if i in models.taps:
            tapped[i] = list(streams)
    logits = jnp.zeros((len(rows), 1, models.target.config.vocab_size), jnp.float32)
    length = target.length
    for n, (_, count) in enumerate(cut):
        logits, length = _last_logits(models, streams[n], count, logits), length + count
        if draft is not None:
            features = jnp.concatenate([tapped[i][n] for i in models.taps], axis=-1)
            draft = _extend_chunk(models, draft, features, count)
    return TargetCache(tuple(layers), length), draft, logits


def _cut_chunk(rows: list[list[int]], first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, width] and how many of each row are the prompt's."""
    tokens = np.zeros((len(rows), width), np.int32)
    for b, row in enumerate(rows):
        part = row[first : first + width]
        tokens[b, : len(part)] = part
    count = np.clip(np.array([len(row) for row in rows]) - first, 0, width).astype(np.int32)
    return tokens, count


def _readable(at: np.ndarray, slots: int) -> int:
    """The compiled prefix that covers what is committed."""
    return next(n for n in (0, *prefixes(slots)) if n >= at.max())


_whole_chunk = jax.jit(whole_chunk, static_argnames="slots", donate_argnames=("target", "draft", "logits"))
_embed_chunk = jax.jit(embed_chunk)
_layer_chunk = jax.jit(layer_chunk, static_argnames=("target", "index", "slots"), donate_argnames="cache")
_last_logits = jax.jit(last_logits, donate_argnames="logits")
_extend_chunk = jax.jit(extend_chunk, donate_argnames="draft")
_begin = jax.jit(begin, static_argnames=("options", "budget"), donate_argnames=("target", "draft"))


def _caches(
    models: Models, state: RoundState | None, batch: int, slots: int
) -> tuple[TargetCache, DraftCache | None]:
    if state is not None:
        if models.draft is not None and state.draft_cache is None:
            raise ConfigError("the state was made without a draft: its context features are gone")
        # Copied, because the chunks update their caches in place and `state` must stay usable.
        draft = jax.tree.map(jnp.copy, state.draft_cache) if models.draft is not None else None
        target = jax.tree.map(jnp.copy, state.target_cache)
        return grow(target, slots), grow(draft, slots) if draft is not None else None
    dtype = jax.tree.leaves(models.target_params)[0].dtype
    target = target_cache(models.target.config, batch, slots, dtype)
    if models.draft is None:
        return target, None
    return target, draft_cache(models.draft.config, batch, slots, dtype)


def complete(
    models: Models, prompts: Sequence[Sequence[int]], options: Options, *, max_new_tokens: int, **request
) -> Generation:
    """Prefill, generate, read: what most callers want. A budget of 0 runs nothing."""
    if max_new_tokens == 0:
        empty: list[list] = [[] for _ in prompts]
        return Generation(empty, ["length"] * len(empty), empty, [])
    state = prefill(models, prompts, options, max_new_tokens=max_new_tokens, **request)
    if models.draft is None:
        return finish(generate_autoregressive(models, state, options.logprobs), options.logprobs)
    return finish(generate(models, state, options), options.logprobs)
