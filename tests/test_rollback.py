"""Rollback of hybrid targets is selection: at every count of a chain and at every node of random trees, by a
tape and by saved states, the committed cache is the one that feeding the same tokens one by one gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import decode, stepwise, testing
from dflash_jax.block import chain_block, tree_block
from dflash_jax.cache import (
    KVCache,
    RecurrentState,
    TargetCache,
    cache_bytes,
    commit,
    join_trails,
    pad_trail,
    target_cache,
    trail_bytes,
)
from dflash_jax.generation import finish
from dflash_jax.policy import Fixed
from dflash_jax.state import Options

B, T, SLOTS = 2, 6, 32
CONFIG = testing.target_config("qwen3_5")
MODELS = testing.make_models(CONFIG)
REMEMBER = ("tape", "states")
TOKENS = jnp.asarray((np.arange(B * T).reshape(B, T) * 7 + 1) % testing.VOCAB, jnp.int32)


@functools.partial(jax.jit, static_argnames="trail")
def forward(parents, cache, trail):
    return MODELS.run_target(tree_block(TOKENS, parents), cache, trail=trail)


@functools.partial(jax.jit, static_argnames="trail")
def chain(tokens, count, cache, trail="tape"):
    """A chain of which count[b] tokens are valid, and the cache with these committed."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = MODELS.run_target(chain_block(tokens, valid=steps < count[:, None]), cache, trail=trail)
    return commit(cache, output.trail, steps, count), output


select = jax.jit(commit)


@jax.jit
def step(token, count, cache):
    """Feed one token to the rows whose count is 1."""
    output = MODELS.run_target(chain_block(token[:, None]), cache)
    return commit(cache, output.trail, jnp.zeros((B, 1), jnp.int32), count), output.logits


@functools.cache
def start() -> TargetCache:
    """5 positions committed in row 0, 2 in row 1: more and fewer than the convolution is wide."""
    cache = target_cache(CONFIG, B, SLOTS, jnp.float32)
    for i in range(5):
        cache, _ = step(jnp.asarray([i, 9 - i], jnp.int32), jnp.asarray([1, i < 2], jnp.int32), cache)
    return cache


def assert_same(one: TargetCache, two: TargetCache, atol: float = 2e-5) -> None:
    np.testing.assert_array_equal(one.length, two.length)
    for a, b in zip(one.layers, two.layers, strict=True):
        if isinstance(a, KVCache):
            for row, length in enumerate(np.asarray(one.length)):
                np.testing.assert_allclose(a.k[row, :, :length], b.k[row, :, :length], rtol=1e-5, atol=atol)
                np.testing.assert_allclose(a.v[row, :, :length], b.v[row, :, :length], rtol=1e-5, atol=atol)
        else:
            np.testing.assert_allclose(a.s, b.s, rtol=1e-5, atol=atol)
            np.testing.assert_allclose(a.conv, b.conv, rtol=1e-5, atol=atol)


def root_path(parents: np.ndarray, node: int) -> list[int]:
    return [] if node < 0 else [*root_path(parents, int(parents[node])), node]


def check_path(parents: np.ndarray, ends: list[int]) -> None:
    paths = [root_path(parents[row], ends[row]) for row in range(B)]
    count = np.array([len(path) for path in paths], np.int32)
    # What follows the path may be anything in range.
    path = np.array([[*path, T - 1, 0, 3, 1, 2, 4][:T] for path in paths], np.int32)
    one_by_one, last = start(), {}
    for i in range(count.max()):
        token = np.array([TOKENS[row, path[row, i]] for row in range(B)], np.int32)
        one_by_one, logits = step(jnp.asarray(token), jnp.asarray(i < count, jnp.int32), one_by_one)
        last |= {row: np.asarray(logits[row, 0]) for row in range(B) if i == count[row] - 1}
    for trail in REMEMBER:
        output = forward(jnp.asarray(parents), start(), trail)
        assert_same(select(start(), output.trail, jnp.asarray(path), jnp.asarray(count)), one_by_one)
        for row, logits in last.items():  # a node's logits are those of its root path (case 36)
            np.testing.assert_allclose(output.logits[row, ends[row]], logits, atol=1e-4)


# --- every count, every node (cases 21, 36) -------------------------------------------------------------


@pytest.mark.parametrize("count", range(T + 1))
def test_every_count_of_a_chain(count: int) -> None:
    parents = np.tile(np.arange(-1, T - 1, dtype=np.int32), (B, 1))
    check_path(parents, [count - 1, T - 1 - count])


@st.composite
def trees(draw: st.DrawFn) -> np.ndarray:
    parents = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, T)] for _ in range(B)]
    return np.array(parents, np.int32)


@given(trees())
def test_every_node_of_a_tree(parents: np.ndarray) -> None:
    for node in range(T):
        check_path(parents, [node, T - 1 - node])


# --- rejection does not show (case 22), padding neither (case 24) ---------------------------------------


def test_rejected_tokens_leave_no_mark() -> None:
    """Teacher-forced text with wrong candidates after it, rejected in different places: one state."""
    text = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]], np.int32)
    whole, _ = chain(jnp.asarray(text), jnp.full(B, 8, jnp.int32), start())
    for pattern in ((3, 3, 2), (1, 4, 3), (2, 1, 5)):
        cache, at = start(), 0
        for kept in pattern:
            right, wrong = text[:, at : at + kept], 10 - text[:, : T - kept]
            block = jnp.asarray(np.concatenate([right, wrong], axis=1))
            path = jnp.asarray(np.tile(np.arange(T, dtype=np.int32), (B, 1)))
            cache = select(cache, chain_output(block, cache).trail, path, jnp.full(B, kept, jnp.int32))
            at += kept
        assert_same(cache, whole, 1e-4)


def chain_output(tokens, cache):
    return chain(tokens, jnp.full(B, tokens.shape[1], jnp.int32), cache)[1]


def test_padding_of_a_chunk_leaves_the_state_alone() -> None:
    padded, _ = chain(TOKENS, jnp.asarray([4, 0], jnp.int32), start())
    exact, _ = chain(TOKENS[:, :4], jnp.asarray([4, 0], jnp.int32), start())
    assert_same(padded, exact, 1e-5)
    for layer, old in zip(padded.layers, start().layers, strict=True):
        if isinstance(layer, RecurrentState):
            np.testing.assert_array_equal(layer.s[1], old.s[1])
            np.testing.assert_array_equal(layer.conv[1], old.conv[1])


def test_states_stay_float32_under_bfloat16_weights() -> None:
    """Case 23."""
    cache = target_cache(CONFIG, B, SLOTS, jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODELS.target_params)
    trail = jax.jit(MODELS.target.apply)({"params": params}, chain_block(TOKENS), cache).trail
    steps = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    after = commit(cache, trail, steps, jnp.full(B, T, jnp.int32))
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, cache)
    states = [layer.s for layer in after.layers if isinstance(layer, RecurrentState)]
    assert states and all(s.dtype == jnp.float32 and bool(jnp.any(s != 0)) for s in states)


# --- trails and bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("trail", REMEMBER)
def test_trails_that_are_joined_or_padded_commit_the_same(trail: str) -> None:
    parents = jnp.asarray(np.tile(np.arange(-1, T - 1), (B, 1)), jnp.int32)
    batched = forward(parents, start(), trail).trail
    cache, parts = start(), []
    for i in range(T):
        cache, output = chain(TOKENS[:, i : i + 1], jnp.ones(B, jnp.int32), cache, trail)
        parts.append(output.trail)
    path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    count = jnp.asarray([4, 6], jnp.int32)
    expected = commit(start(), batched, path, count)
    assert_same(commit(start(), join_trails(parts), path, count), expected)
    wide = jnp.pad(path, ((0, 0), (0, 3)))
    assert_same(commit(start(), pad_trail(batched, 3), wide, count), expected, 1e-6)


@pytest.mark.parametrize("trail", REMEMBER)
def test_bytes(trail: str) -> None:
    cache = target_cache(CONFIG, B, SLOTS, jnp.float32)
    assert cache_bytes(CONFIG, B, SLOTS, 4) == sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    output = forward(jnp.asarray(np.tile(np.arange(-1, T - 1), (B, 1)), jnp.int32), cache, trail)
    assert trail_bytes(CONFIG, B, T, 4, trail) == sum(x.nbytes for x in jax.tree.leaves(output.trail))


# --- the loops ------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [5]]
BUDGET = 24


@functools.cache
def autoregressive() -> list[list[int]]:
    return decode.complete(MODELS.without_draft(), PROMPTS, Options(Fixed(4)), max_new_tokens=BUDGET).tokens


@functools.cache
def half_right():
    """A draft that recites the target's output and is wrong at every third token."""
    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, autoregressive(), strict=True)]
    wrong = np.tile(np.arange(64) % 3 == 2, (len(PROMPTS), 1))
    return testing.scripted(MODELS, texts, wrong)


@pytest.mark.parametrize("rollback", REMEMBER)
def test_generate_is_autoregressive(rollback: str) -> None:
    options = Options(Fixed(4), rollback=rollback)
    generation = decode.complete(half_right(), PROMPTS, options, max_new_tokens=BUDGET)
    assert generation.tokens == autoregressive()
    assert len(set(generation.committed[0])) > 1, "some rounds reject and some accept"


@pytest.mark.parametrize(
    ("rollback", "verify", "bonus"),
    [
        ("tape", "batched", "implicit"),
        ("tape", "sequential", "explicit"),
        ("states", "batched", "explicit"),
        ("states", "sequential", "implicit"),
        ("replay", "batched", "explicit"),
        ("replay", "sequential", "implicit"),
    ],
)
def test_stepwise_is_autoregressive(rollback: str, verify: str, bonus: str) -> None:
    options = Options(Fixed(4), rollback=rollback)
    state = decode.prefill(half_right(), PROMPTS, options, max_new_tokens=BUDGET)
    *_, (last, _) = stepwise.generate_stepwise(half_right(), state, options, verify=verify, bonus=bonus)
    assert finish(last).tokens == autoregressive()


@pytest.mark.parametrize("order", ["tokens", "layers"])
@pytest.mark.parametrize("chunk_size", [1, 3, 7])
def test_any_prefill_gives_the_same_cache(chunk_size: int, order: str) -> None:
    whole = decode.prefill(MODELS, PROMPTS, Options(Fixed(4)), max_new_tokens=BUDGET)
    pieces = decode.prefill(
        MODELS, PROMPTS, Options(Fixed(4)), max_new_tokens=BUDGET, chunk_size=chunk_size, order=order
    )
    assert_same(whole.target_cache, pieces.target_cache, 1e-4)
    np.testing.assert_array_equal(whole.anchor, pieces.anchor)
