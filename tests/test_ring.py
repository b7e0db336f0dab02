"""A draft context of fixed size: a ring that is the full context where the draft does not look beyond its window,
and never anything but the draft's business."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import BLOCKS, BUDGET, PROMPTS, C, autoregressive, pair

from dflash_jax import decode, drafts, testing
from dflash_jax.cache import DraftCache, KVCache, Ring, draft_cache, extend_context, grow, prefix
from dflash_jax.config import FULL, SLIDING, ConfigError, DraftConfig
from dflash_jax.drafts import DFlash
from dflash_jax.state import Models, RoundState

WINDOW, ROWS = 5, 3
RING = Ring.of(WINDOW, ROWS)
LENGTHS = np.arange(3 * RING.slots)  # a batch row for every offset, before and after the first wraps
TARGET = testing.target_config()


def draft(*kinds: str, **changes: Any) -> DraftConfig:
    return testing.draft_config(TARGET, layer_types=kinds, sliding_window=WINDOW, **changes)


SLIDES = draft(SLIDING, SLIDING)


def of_positions(cache: DraftCache, count: np.ndarray) -> DraftCache:
    """Extended by rows that hold their own positions; what is beyond `count` is NaN."""
    steps = np.arange(ROWS)
    rows = np.where(steps < count[:, None], np.asarray(cache.length)[:, None] + steps, np.nan)
    values = np.broadcast_to(rows[:, None, :, None], (len(count), SLIDES.num_kv_heads, ROWS, SLIDES.head_dim))
    new = KVCache(jnp.asarray(values, jnp.float32), jnp.asarray(-values, jnp.float32))
    return extend_context(cache, (new,) * SLIDES.num_layers, jnp.asarray(count, jnp.int32))


def at_every_offset(ring: Ring, last: np.ndarray) -> DraftCache:
    """LENGTHS rows of context in pieces of ROWS, the last piece of `last` rows and padding."""
    cache = draft_cache(SLIDES, len(LENGTHS), 1000, jnp.float32, ring)
    before = LENGTHS - last
    while (left := before - np.asarray(cache.length)).any():
        cache = of_positions(cache, np.clip(left, 0, ROWS))
    return of_positions(cache, last)


@pytest.mark.parametrize("kept", range(ROWS + 1))
def test_what_is_visible_is_there_at_every_offset(kept: int) -> None:
    """The padding of a write never lands on one of the last `window` positions, and with a slot less it would."""
    last = np.minimum(kept, LENGTHS)

    def intact(ring: Ring) -> bool:
        cache = at_every_offset(ring, last)
        np.testing.assert_array_equal(cache.length, LENGTHS)
        slots = jnp.arange(cache.slots)[None]
        held = np.asarray(ring.held(slots, jnp.asarray(LENGTHS)[:, None]))
        visible = (held >= 0) & (held >= LENGTHS[:, None] - WINDOW)
        np.testing.assert_array_equal(visible.sum(1), np.minimum(LENGTHS, WINDOW))
        found = np.asarray(cache.layers[1].k)[:, 0, :, 0]
        np.testing.assert_array_equal(-found, np.asarray(cache.layers[0].v)[:, 1, :, -1])
        return bool(np.array_equal(found[visible], held[visible]))

    assert intact(RING)
    if kept == 0:
        narrow = _Unchecked(WINDOW, RING.slots - 1)
        assert not intact(narrow)


class _Unchecked(Ring):
    """A ring that lets a write of ROWS pass whatever its size."""

    @property
    def rows(self) -> int:
        return ROWS


def test_a_write_that_would_reach_the_window_is_refused() -> None:
    cache = draft_cache(SLIDES, 1, 1000, jnp.float32, RING)
    rows = KVCache(*[jnp.zeros((1, SLIDES.num_kv_heads, ROWS + 1, SLIDES.head_dim))] * 2)
    with pytest.raises(ConfigError, match=r"4 rows at once do not fit .* made for 3 beside its window of 5"):
        extend_context(cache, (rows,) * SLIDES.num_layers, jnp.ones(1, jnp.int32))
    with pytest.raises(ConfigError, match="draft_window is 0"):
        Ring.of(0, ROWS)


def test_room_of_a_ring() -> None:
    """A short context takes what it needs, a long one what the ring has; a prefix of a ring is one."""
    short = draft_cache(SLIDES, 1, 6, jnp.float32, RING)
    assert short.slots == 6 and draft_cache(SLIDES, 1, 99, jnp.float32, RING).slots == RING.slots == 8
    assert grow(short, 7).slots == 7 and grow(short, 1000).slots == RING.slots
    assert grow(grow(short, 1000), 2000).slots == RING.slots
    assert prefix(short, 4).ring == RING and prefix(short, 4).slots == 4


@pytest.mark.parametrize(
    ("config", "window", "covered"),
    [
        (SLIDES, WINDOW, True),
        (SLIDES, WINDOW - 1, True),
        (SLIDES, WINDOW - 2, False),
        (draft(SLIDING, FULL), 1000, False),
    ],
)
def test_whether_a_ring_is_all_that_a_draft_sees(config: DraftConfig, window: int, covered: bool) -> None:
    assert Ring.of(window, 1).covers(config) == covered


# --- what the draft makes of it ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="module")
def proposed(module: DFlash, params: dict, cache: DraftCache, features, count, embeddings):
    """Contexts of `count` rows, written in pieces of ROWS, and the block's hidden states."""

    def piece(i: jax.Array, cache: DraftCache) -> DraftCache:
        part = jax.lax.dynamic_slice_in_dim(features, i * ROWS, ROWS, axis=1)
        now = jnp.clip(count - i * ROWS, 0, ROWS).astype(jnp.int32)
        return module.apply({"params": params}, cache, part, now, method="extend")

    cache = jax.lax.fori_loop(0, features.shape[1] // ROWS, piece, cache)
    return module.apply({"params": params}, cache, embeddings, method="propose")


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_is_the_full_context_of_a_sliding_draft(causal: bool) -> None:
    config = dataclasses.replace(SLIDES, causal=(causal, causal))
    module, params = DFlash(config), testing.random_params(drafts.abstract_params(config), seed=3)
    rng = np.random.default_rng(4)
    batch, longest = len(LENGTHS), -(-len(LENGTHS) // ROWS) * ROWS
    shape = (batch, longest, len(config.taps) * config.hidden_size)
    features = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    embeddings = jnp.asarray(rng.standard_normal((batch, C, config.hidden_size)), jnp.float32)

    def hidden(ring: Ring | None) -> np.ndarray:
        empty = draft_cache(config, batch, longest + ROWS, jnp.float32, ring)
        assert empty.slots == (ring.slots if ring else longest + ROWS)
        return np.asarray(proposed(module, params, empty, features, jnp.asarray(LENGTHS), embeddings))

    full = hidden(None)
    np.testing.assert_allclose(hidden(RING), full, atol=2e-4)
    less = WINDOW - 2  # a row sees itself and WINDOW - 1 before it
    other = np.abs(hidden(Ring.of(less, ROWS)) - full).max((1, 2))
    assert other[: less + 1].max() < 2e-4 and other[less + 1 :].max() > 0.01


# --- the compiled loop ------------------------------------------------------------------------------------


@functools.cache
def models(*kinds: str) -> Models:
    """The target of the other tests with another draft."""
    return testing.make_models(TARGET, draft(*kinds))


def run(models: Models, **how: Any) -> RoundState:
    """With chunks of C rows, so that the ring (13 slots, of 55 positions) wraps several times."""
    start = decode.prefill(models, PROMPTS, BLOCKS, max_new_tokens=BUDGET, chunk_size=C, **how)
    return decode.generate(models, start, BLOCKS)


def output(state: RoundState) -> list[list[int]]:
    return np.asarray(state.tokens)[:, :BUDGET].tolist()


def test_decoding_with_a_ring() -> None:
    """All sliding: the same rounds as with the full context. With a full layer: the same tokens."""
    full, ring = run(models(SLIDING, SLIDING)), run(models(SLIDING, SLIDING), draft_window=WINDOW)
    assert ring.draft_cache is not None and ring.draft_cache.slots == WINDOW + C
    assert output(ring) == output(full) == autoregressive()
    np.testing.assert_array_equal(ring.committed, full.committed)
    near = run(models(SLIDING, FULL), draft_window=WINDOW)
    assert output(near) == autoregressive()
    far = run(models(SLIDING, FULL))
    assert not np.array_equal(near.committed, far.committed)


def test_a_conversation_goes_on_in_its_ring() -> None:
    """Prompts that follow, in wider chunks than the ring takes at once, layer by layer."""
    first = run(models(SLIDING, SLIDING), draft_window=WINDOW)
    follow = [[1 + (3 * b + j) % 9 for j in range(2 * C + 1)] for b in range(len(PROMPTS))]

    def go_on(state: RoundState, **how: Any) -> RoundState:
        start = decode.prefill(
            models(SLIDING, SLIDING), follow, BLOCKS, max_new_tokens=BUDGET, state=state, **how
        )
        return decode.generate(models(SLIDING, SLIDING), start, BLOCKS)

    again = go_on(first, chunk_size=64, draft_window=WINDOW, order="layers")
    assert again.draft_cache is not None and again.draft_cache.slots == WINDOW + C
    full = go_on(run(models(SLIDING, SLIDING)))
    assert output(again) == output(full)
    np.testing.assert_array_equal(again.committed, full.committed)
    with pytest.raises(ConfigError, match="draft_window is 6, but the state to continue has a window of 5"):
        go_on(first, draft_window=WINDOW + 1)


def test_a_window_needs_a_draft() -> None:
    with pytest.raises(ConfigError, match="draft_window 5 is of a draft, and there is none"):
        run(pair().without_draft(), draft_window=WINDOW)
