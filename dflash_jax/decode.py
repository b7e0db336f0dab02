"""Speculative decoding with a block-diffusion draft: the algorithm (DFlash 3.1) and its loops.

One round, a pure function of a state:

    propose   the draft fills [anchor, MASK, ...] in one pass, seeing every committed position
    verify    the target looks at the whole block in one pass; nothing is written
    accept    walk from the anchor while the target agrees
    commit    select the accepted rows into the next caches; the target's own choice after them is
              the next anchor ("implicit bonus": emitted now, forwarded in the next round)

`generate` is `lax.while_loop(round)` on the device. `generate_stepwise` calls the same functions
from Python, to look inside, to stream, and for the debugging modes. Autoregressive decoding is a
round whose block is the anchor alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block, chain_block
from dflash_jax.cache import DraftCache, TargetCache, Trail, commit, draft_cache, grow, prefix, target_cache
from dflash_jax.config import ConfigError
from dflash_jax.generation import Generation, finish
from dflash_jax.policy import Fixed
from dflash_jax.sampling import Acceptance, Sampling, accept, choose, propose_samples, sampling
from dflash_jax.state import AUTOREGRESSIVE, LENGTH, RUNNING, STOP, Models, Options, RoundState, RoundTrace
from dflash_jax.targets import TargetOutput

_SHORTEST_PREFIX = 256  # slots; longer prefixes grow by 4, so that few programs cover any length


@struct.dataclass
class Verified:
    """The read-only half of a round, padded to the largest block size."""

    block: Block
    acceptance: Acceptance
    logprobs: Array
    features: Array
    trail: Trail
    size: Array


# --- one round ----------------------------------------------------------------------------------------


def round(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    """Propose, verify, accept, commit. One of a few compiled (block size, cache prefix) pairs runs."""
    prefixes = _prefixes(state.target_cache.layers[0].slots)
    longest = jnp.max(jnp.where(state.done, 0, state.target_cache.length))
    shortest = jnp.sum(longest > jnp.asarray(prefixes), dtype=jnp.int32)
    branch = options.policy.choose(state.policy) * len(prefixes) + shortest
    verified = lax.switch(
        branch,
        [
            partial(_read, models, options=options, size=size, slots=slots)
            for size in options.policy.sizes
            for slots in prefixes
        ],
        state,
    )
    return _write(models, state, verified, options)


def _read(models: Models, state: RoundState, options: Options, size: int, slots: int) -> Verified:
    """The forwards of a round over a prefix of the caches. Writes nothing."""
    block, draft_probs = propose(models, state, options, size, slots)
    output = verify(models, state, block, slots)
    return _judge(state, block, output, draft_probs, options)


def propose(
    models: Models, state: RoundState, options: Options, size: int, slots: int
) -> tuple[Block, Float[Array, "B c V"] | None]:
    """The block to verify: the anchor and size - 1 candidates, all from one pass of the draft."""
    anchor = state.anchor[:, None]
    if size == 1 or models.draft is None:
        return chain_block(anchor), None
    with jax.named_scope("propose"):
        draft, head = models.draft, partial(_target, models, method="head")
        masks = jnp.full((anchor.shape[0], size - 1), draft.config.mask_token_id, jnp.int32)
        embeddings = _target(models, jnp.concatenate([anchor, masks], axis=1), method="embed")
        context = prefix(state.draft_cache, slots)
        hidden = draft.apply({"params": models.draft_params}, context, embeddings, method="propose")
        logits = draft.logits(hidden, head)
        if options.proposal == "sample":
            positions = state.target_cache.length[:, None] + jnp.arange(1, size)[None]
            candidates, probs = propose_samples(logits, state.sampling, state.seeds, positions)
        else:
            candidates, probs = jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    return chain_block(jnp.concatenate([anchor, candidates], axis=1)), probs


def verify(models: Models, state: RoundState, block: Block, slots: int) -> TargetOutput:
    """The target's view of every node of the block, in one forward."""
    with jax.named_scope("verify"):
        return _target(models, block, prefix(state.target_cache, slots), models.taps)


def _target(models: Models, *args, **kwargs):
    return models.target.apply({"params": models.target_params}, *args, **kwargs)


def _judge(
    state: RoundState, block: Block, output: TargetOutput, draft_probs: Array | None, options: Options
) -> Verified:
    positions = state.target_cache.length[:, None] + block.depth + 1
    accepted = accept(block, output.logits, state.sampling, state.seeds, positions, draft_probs)
    logprobs = jnp.zeros(accepted.tokens.shape, jnp.float32)
    if options.logprobs:
        rows = jnp.take_along_axis(output.logits, accepted.path[:, :, None], axis=1)
        logprobs = _log_probability(rows, accepted.tokens)
    wide = partial(_pad_rows, rows=options.largest - block.size)
    return Verified(
        block=Block(wide(block.tokens), wide(block.parents), wide(block.depth),
                    wide(wide(block.ancestors), axis=2), wide(block.valid)),
        acceptance=Acceptance(wide(accepted.path), accepted.count, wide(accepted.tokens),
                              wide(accepted.choices)),
        logprobs=wide(logprobs),
        features=wide(output.features),
        trail=jax.tree.map(partial(wide, axis=2), output.trail),
        size=jnp.asarray(block.size, jnp.int32),
    )  # fmt: skip


def _pad_rows(x: Array, rows: int, axis: int = 1) -> Array:
    return jnp.pad(x, [(0, rows if i == axis else 0) for i in range(x.ndim)]) if rows else x


def _log_probability(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _write(
    models: Models, state: RoundState, verified: Verified, options: Options, counted: bool = True
) -> tuple[RoundState, RoundTrace]:
    """The rest of a round: cut at a stop token or the budget, commit the path, emit its tokens."""
    accepted = verified.acceptance
    kept, reason = _cut(state, accepted.tokens, accepted.count)
    last = jnp.take_along_axis(accepted.tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    cache = commit(state.target_cache, verified.trail, accepted.path, kept)
    context = state.draft_cache
    if models.draft is not None:
        features = jnp.take_along_axis(verified.features, accepted.path[:, :, None], axis=1)
        context = models.draft.apply(
            {"params": models.draft_params}, context, features, kept, method="extend"
        )
    state = state.replace(  # type: ignore[attr-defined]
        target_cache=cache,
        draft_cache=context,
        anchor=jnp.where(kept > 0, last, state.anchor),
        tokens=_emit(state.tokens, accepted.tokens, state.emitted),
        logprobs=_emit(state.logprobs, verified.logprobs, state.emitted),
        emitted=state.emitted + kept,
        reason=reason,
    )
    if counted:
        state = state.replace(
            committed=lax.dynamic_update_slice(state.committed, kept[:, None], (0, state.rounds)),
            sizes=lax.dynamic_update_slice(state.sizes, verified.size[None], (state.rounds,)),
            rounds=state.rounds + 1,
            policy=options.policy.update(state.policy, kept),
        )
    return state, RoundTrace(verified.block, accepted, kept)


def _cut(
    state: RoundState, tokens: Int[Array, "B T"], count: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the new tokens each row keeps, and why it ends. A row that is done keeps none."""
    index = jnp.arange(tokens.shape[1])[None]
    stop = (tokens[:, :, None] == state.stops[None, None, :]).any(-1) & (index < count[:, None])
    first_stop = jnp.where(stop.any(-1), jnp.argmax(stop, axis=-1), tokens.shape[1])
    room = state.limit - state.emitted
    kept = jnp.minimum(jnp.minimum(count, first_stop + 1), room)
    kept = jnp.where(state.done, 0, kept).astype(jnp.int32)
    ended = jnp.where(first_stop < kept, STOP, jnp.where(kept == room, LENGTH, RUNNING))
    return kept, jnp.where(state.done, state.reason, ended.astype(jnp.int32))


def _emit(buffer: Array, new: Array, at: Int[Array, " B"]) -> Array:
    """new[b] written at at[b]; what exceeds a row's count is overwritten by its next round."""
    return jax.vmap(lambda row, values, start: lax.dynamic_update_slice(row, values, (start,)))(
        buffer, new, at
    )


def _prefixes(slots: int) -> tuple[int, ...]:
    """The cache prefixes that are compiled: attention costs what is committed, not what is allocated."""
    lengths = []
    length = _SHORTEST_PREFIX
    while length < slots:
        lengths.append(length)
        length *= 4
    return (*lengths, slots)


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
    state = state.replace(draft_cache=None, policy=options.policy.init())  # type: ignore[attr-defined]
    return generate(models.without_draft(), state, options)


_round = jax.jit(round, static_argnames="options")
_propose = jax.jit(propose, static_argnames=("options", "size", "slots"))
_verify = jax.jit(verify, static_argnames="slots")
_judge_jit = jax.jit(_judge, static_argnames="options")
_write_jit = jax.jit(_write, static_argnames=("options", "counted"))
_commit = jax.jit(commit)


def generate_stepwise(
    models: Models,
    state: RoundState,
    options: Options,
    *,
    policy: Any = None,
    verify: Literal["batched", "sequential"] = "batched",
    bonus: Literal["implicit", "explicit"] = "implicit",
) -> Iterator[tuple[RoundState, RoundTrace]]:
    """The same rounds from Python: yields (state, trace) after each.

    policy: any object with `init`, `update`, `choose` and `sizes`, called on the host.
    verify "sequential": one-row forwards along the chain, the debugging reference of batched verify.
    bonus "explicit": the round's last token is forwarded at once; that adds a forward (and the
    token it yields), not a count to tau.
    """
    chooser, p = policy, policy.init() if policy is not None else None
    while not bool(jnp.all(state.done)):
        now = options
        if chooser is not None:
            now = Options(
                Fixed(int(chooser.sizes[int(chooser.choose(p))])), options.proposal, options.logprobs
            )
            state = state.replace(policy=())  # type: ignore[attr-defined]
        if verify == "sequential":
            state, trace = _sequential_round(models, state, now)
        else:
            state, trace = _round(models, state, now)
        if chooser is not None:
            p = chooser.update(p, np.asarray(trace.kept))
        yield state, trace
        if bonus == "explicit" and not bool(jnp.all(state.done)):
            state, trace = _bonus(models, state, options)
            yield state, trace


def _sequential_round(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    slots = state.target_cache.layers[0].slots
    size = options.policy.sizes[int(options.policy.choose(state.policy))]
    block, draft_probs = _propose(models, state, options, size, slots)
    step, outputs = state, []
    for i in range(block.size):
        output = _verify(models, step, chain_block(block.tokens[:, i : i + 1]), slots)
        ones = jnp.ones(block.tokens.shape[0], jnp.int32)
        cache = _commit(step.target_cache, output.trail, ones[:, None] * 0, ones)
        step, outputs = step.replace(target_cache=cache), [*outputs, output]
    output = TargetOutput(
        jnp.concatenate([o.logits for o in outputs], axis=1),
        jnp.concatenate([o.features for o in outputs], axis=1),
        jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=2), *[o.trail for o in outputs]),
    )
    return _write_jit(models, state, _judge_jit(state, block, output, draft_probs, options), options)


def _bonus(models: Models, state: RoundState, options: Options) -> tuple[RoundState, RoundTrace]:
    slots = state.target_cache.layers[0].slots
    block, _ = _propose(models, state, options, 1, slots)
    output = _verify(models, state, block, slots)
    verified = _judge_jit(state, block, output, None, options)
    return _write_jit(models, state, verified, options, counted=False)


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
    capacity: int | None = None,
    state: RoundState | None = None,
) -> RoundState:
    """Run the prompts through the target and emit the first token of each row.

    Chunks of at most chunk_size positions are chain blocks that are committed whole; any chunk size
    gives the same caches. Rows may differ in length and budget. capacity: positions to allocate for
    prompt + budget (default: the next bucket), so that later calls of the same capacity do not
    compile again. state: continue this generation: its caches hold the conversation so far, prompts
    are what follows, and its anchor (emitted, not yet in a cache) goes first. `state` is not changed.

    Raises ConfigError before any work when a prompt is empty, an id is no embedding row, or prompt +
    budget exceed the capacity.
    """
    rows, limits = _check_prompts(models, prompts, max_new_tokens, chunk_size)
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
    chunks = _chunks(start, lengths, chunk_size)
    end = max(int(at.max()) + width for _, width, at in chunks)
    slots = max(bucket(capacity or needed) + options.largest, end)
    target, draft = _caches(models, state, len(rows), slots)
    logits = jnp.zeros((len(rows), 1, models.target.config.vocab_size), jnp.float32)
    for first, width, at in chunks:
        tokens = np.zeros((len(rows), width), np.int32)
        for b, row in enumerate(rows):
            part = row[first : first + width]
            tokens[b, : len(part)] = part
        count = np.clip(lengths - first, 0, width).astype(np.int32)
        read = next(n for n in (0, *_prefixes(slots)) if n >= at.max())
        target, draft, logits = _prefill_chunk(models, target, draft, logits, tokens, count, read)
    if state is not None:
        how, seeds, stop_ids = how or state.sampling, seeds or state.seeds, stop_ids or state.stops
    return _begin(
        target, draft, logits, jnp.asarray(limits, jnp.int32),
        jnp.asarray(range(len(rows)) if seeds is None else seeds, jnp.int32),
        _stop_array(stop_ids), how or sampling(), options, bucket(int(limits.max())),
    )  # fmt: skip


def bucket(n: int) -> int:
    """Sizes that programs are compiled for: powers of two up to 1024, then multiples of 1024."""
    return max(64, 1 << (n - 1).bit_length()) if n <= 1024 else -(-n // 1024) * 1024


def _check_prompts(
    models: Models, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], chunk_size: int
) -> tuple[list[list[int]], np.ndarray]:
    rows = [[int(token) for token in prompt] for prompt in prompts]
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int64), (len(rows),))
    vocab = models.target.config.vocab_size
    if not rows or not all(rows):
        raise ConfigError("a prompt is empty: every row needs at least one token")
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}: it must be positive")
    if limits.min() < 1:
        raise ConfigError("max_new_tokens must be at least 1: a budget of 0 needs no model")
    for row in rows:
        if not 0 <= min(row) <= max(row) < vocab:
            raise ConfigError(
                f"token id {min(row) if min(row) < 0 else max(row)} is outside the {vocab} rows"
            )
    return rows, limits


def _chunks(start: np.ndarray, lengths: np.ndarray, size: int) -> list[tuple[int, int, np.ndarray]]:
    """(first prompt index, compiled width, committed length of each row) per chunk. Only the last
    chunk is narrower, and its width is a power of two, so few widths are compiled."""
    longest = int(lengths.max())
    return [
        (
            first,
            min(size, max(16, 1 << (longest - first - 1).bit_length())),
            start + np.minimum(lengths, first),
        )
        for first in range(0, longest, size)
    ]


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


def _stop_array(stop_ids: Sequence[int] | Array) -> Array:
    """Padded with -1 to a power of two, so that the number of stop ids rarely compiles again."""
    ids = [int(i) for i in np.asarray(stop_ids).reshape(-1) if i >= 0]
    width = max(4, 1 << max(0, len(ids) - 1).bit_length())
    return jnp.asarray(ids + [-1] * (width - len(ids)), jnp.int32)


@partial(jax.jit, static_argnames="slots", donate_argnames=("target", "draft", "logits"))
def _prefill_chunk(
    models: Models,
    target: TargetCache,
    draft: DraftCache | None,
    logits: Float[Array, "B 1 V"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    slots: int,
) -> tuple[TargetCache, DraftCache | None, Float[Array, "B 1 V"]]:
    """Commit count[b] rows of the chunk; logits keeps those of each row's last position so far."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    block = chain_block(tokens, valid=steps < count[:, None])
    output = _target(models, block, prefix(target, slots), models.taps, logits="last")
    if models.draft is not None:
        params = {"params": models.draft_params}
        draft = models.draft.apply(params, draft, output.features, count, method="extend")
    logits = jnp.where((count > 0)[:, None, None], output.logits, logits)
    return commit(target, output.trail, steps, count), draft, logits


@partial(jax.jit, static_argnames=("options", "budget"), donate_argnames=("target", "draft"))
def _begin(
    target: TargetCache,
    draft: DraftCache | None,
    logits: Float[Array, "B 1 V"],
    limit: Int[Array, " B"],
    seeds: Int[Array, " B"],
    stops: Int[Array, " n"],
    how: Sampling,
    options: Options,
    budget: int,
) -> RoundState:
    batch = limit.shape[0]
    anchor = choose(logits, how, seeds, target.length[:, None])
    logprobs = _log_probability(logits, anchor) if options.logprobs else jnp.zeros((batch, 1))
    state = RoundState(
        target_cache=target,
        draft_cache=draft,
        anchor=anchor[:, 0],
        tokens=jnp.zeros((batch, budget + options.largest), jnp.int32),
        logprobs=jnp.zeros((batch, budget + options.largest), jnp.float32),
        emitted=jnp.zeros(batch, jnp.int32),
        limit=limit,
        committed=jnp.zeros((batch, budget), jnp.int32),
        sizes=jnp.zeros(budget, jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        reason=jnp.full(batch, RUNNING, jnp.int32),
        seeds=seeds,
        stops=stops,
        policy=options.policy.init(),
        sampling=how,
    )
    kept, reason = _cut(state, anchor, jnp.ones(batch, jnp.int32))
    return state.replace(  # type: ignore[attr-defined]
        tokens=_emit(state.tokens, anchor, state.emitted),
        logprobs=_emit(state.logprobs, logprobs, state.emitted),
        emitted=kept,
        reason=reason,
    )


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
