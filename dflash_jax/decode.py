"""Speculative decoding with a block-diffusion draft: the algorithm (DFlash 3.1) and its loops.

A round (rounds.py) is a pure function of a state, and `generate` is `lax.while_loop(round)` on the device;
stepwise.py calls the same functions from Python, to look inside, to stream, for the debugging modes and for models
in pieces. Autoregressive decoding is a round whose block is the anchor alone. Here is everything that is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dflash_jax.buckets import bucket, check_prompts, chunks_of, prefixes, stop_array
from dflash_jax.cache import (
    DraftCache,
    Ring,
    TargetCache,
    commit,
    commit_layer,
    draft_cache,
    grow,
    target_cache,
)
from dflash_jax.config import ConfigError
from dflash_jax.generation import Generation, finish
from dflash_jax.placement import draft_cache_beside, follow, target_cache_beside
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
from dflash_jax.rounds import denoise, embed, first_drafted, judge, pick, propose, round, verify, write
from dflash_jax.sampling import Sampling, sampling
from dflash_jax.state import AUTOREGRESSIVE, Models, Options, RoundState
from dflash_jax.tree import draft_tree, top_k

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
propose_step = jax.jit(propose, static_argnames=("options", "size", "slots"))
verify_step = jax.jit(verify, static_argnames=("slots", "options"))
judge_step = jax.jit(judge, static_argnames="options")
write_step = jax.jit(write, static_argnames=("options", "counted"))
commit_step = jax.jit(commit)
# What of them runs where, when the models are in pieces.
embed_step = jax.jit(embed, static_argnames="size")
denoise_step = jax.jit(denoise, static_argnames="slots")
pick_step = jax.jit(pick, static_argnames=("options", "size"))
first_step = jax.jit(first_drafted, static_argnames="nodes")
extend_step = jax.jit(extend_chunk)
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
    draft_window: int | None = None,
    state: RoundState | None = None,
) -> RoundState:
    """Run the prompts through the target and emit the first token of each row.

    Chunks of at most chunk_size positions are chain blocks that are committed whole; any chunk size
    gives the same caches. order: "tokens" takes each chunk through all layers; "layers" takes all chunks
    through one layer before the next, and holds the whole prompt's residuals for that: B * prompt * (1 +
    taps) * D values. Rows may differ in length and budget. capacity: positions to allocate for
    prompt + budget (default: the next bucket), so that later calls of the same capacity do not
    compile again. draft_window: the draft sees this many of the last positions, in a ring that does not grow
    (cache.Ring); None: all. state: continue this generation: its caches hold the conversation so far (and
    its window stays), prompts are what follows, and its anchor (emitted, not yet in a cache) goes first. `state`
    is not changed.

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
    ring = _ring(models, state, draft_window, max(chunk_size, options.largest))
    chunks = chunks_of(start, lengths, min(chunk_size, ring.rows) if ring else chunk_size)
    end = max(int(at.max()) + width for _, width, at in chunks)
    slots = max(bucket(capacity or needed) + options.largest, end)
    run = _run_chunks if order == "tokens" else _run_layers
    target, draft, logits = run(models, rows, chunks, *_caches(models, state, len(rows), slots, ring))
    if state is not None:
        how = how or state.sampling
        seeds = np.asarray(state.seeds).tolist() if seeds is None else seeds
        stop_ids = stop_ids or np.asarray(state.stops).tolist()
    begun = _begin(
        target, logits, jnp.asarray(limits, jnp.int32),
        jnp.asarray(range(len(rows)) if seeds is None else seeds, jnp.int32),
        stop_array(stop_ids), how or sampling(), options, bucket(int(limits.max())),
    )  # fmt: skip
    return dataclasses.replace(begun, draft_cache=draft)


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
        embeddings = models.look_up(tokens, target.length)
        target, logits, features = _whole_chunk(
            models.of_target, target, logits, tokens, count, _readable(at, slots), embeddings
        )
        draft = _mirror(models, draft, features, count)
        del features  # not beside those of the next chunk
    return target, draft, logits


def _mirror(
    models: Models, draft: DraftCache | None, features: Float[Array, "B T PD"], count: np.ndarray
) -> DraftCache | None:
    """The context grown, wherever the draft is."""
    if draft is None:
        return None
    return _extend_chunk(models.of_draft, draft, follow(features, draft.length), count)


def _run_layers(
    models: Models,
    rows: list[list[int]],
    chunks: list[tuple[int, int, np.ndarray]],
    target: TargetCache,
    draft: DraftCache | None,
) -> tuple[TargetCache, DraftCache | None, Float[Array, "B 1 V"]]:
    """Layer-segmented: all chunks for one layer after the other."""
    cut = [_cut_chunk(rows, first, width) for first, width, _ in chunks]
    streams = []
    for tokens, count in cut:
        embeddings = models.look_up(tokens, target.length)
        streams.append(_embed_chunk(models.of_target, tokens, count, embeddings))
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
        logits, length = _last_logits(models.of_target, streams[n], count, logits), length + count
        if draft is not None:
            features = jnp.concatenate([tapped[i][n] for i in models.taps], axis=-1)
            draft = _mirror(models, draft, features, count)
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


_whole_chunk = jax.jit(whole_chunk, static_argnames="slots", donate_argnames=("target", "logits"))
_embed_chunk = jax.jit(embed_chunk)
_layer_chunk = jax.jit(layer_chunk, static_argnames=("target", "index", "slots"), donate_argnames="cache")
_last_logits = jax.jit(last_logits, donate_argnames="logits")
_extend_chunk = jax.jit(extend_chunk, donate_argnames="draft")
_begin = jax.jit(begin, static_argnames=("options", "budget"), donate_argnames="target")


def _ring(models: Models, state: RoundState | None, window: int | None, rows: int) -> Ring | None:
    """That of the state, or a new one with room for writes of `rows`."""
    if window is not None and models.draft is None:
        raise ConfigError(f"draft_window {window} is of a draft, and there is none")
    if state is None or state.draft_cache is None:
        return None if window is None else Ring.of(window, rows)
    ring = state.draft_cache.ring
    if window is not None and (ring is None or ring.window != window):
        has = "all of the context" if ring is None else f"a window of {ring.window}"
        raise ConfigError(f"draft_window is {window}, but the state to continue has {has}")
    return ring


def _caches(
    models: Models, state: RoundState | None, batch: int, slots: int, ring: Ring | None = None
) -> tuple[TargetCache, DraftCache | None]:
    if state is not None:
        if models.draft is not None and state.draft_cache is None:
            raise ConfigError("the state was made without a draft: its context features are gone")
        # Copied, because the chunks update their caches in place and `state` must stay usable.
        draft = jax.tree.map(jnp.copy, state.draft_cache) if models.draft is not None else None
        target = jax.tree.map(jnp.copy, state.target_cache)
        return grow(target, slots), grow(draft, slots) if draft is not None else None
    dtype = jax.tree.leaves(models.target_params)[0].dtype
    shapes = jax.eval_shape(partial(target_cache, models.target.config, batch, slots, dtype))
    target = target_cache_beside(shapes, models.target_params)
    if models.draft is None:
        return target, None
    shapes = jax.eval_shape(partial(draft_cache, models.draft.config, batch, slots, dtype, ring))
    return target, draft_cache_beside(shapes, models.draft_params)


def complete(
    models: Models, prompts: Sequence[Sequence[int]], options: Options, *, max_new_tokens: int, **request
) -> Generation:
    """Prefill, generate, read: what most callers want. A budget of 0 runs nothing."""
    if models.in_pieces:
        raise ConfigError("the models are in pieces (dflash_jax.placement): only generate_stepwise runs them")
    if max_new_tokens == 0:
        empty: list[list] = [[] for _ in prompts]
        return Generation(empty, ["length"] * len(empty), empty, [])
    state = prefill(models, prompts, options, max_new_tokens=max_new_tokens, **request)
    if models.draft is None:
        return finish(generate_autoregressive(models, state, options.logprobs), options.logprobs)
    return finish(generate(models, state, options), options.logprobs)
