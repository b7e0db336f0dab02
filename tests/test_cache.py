"""Commit selects: any path of any block gives the cache that feeding its tokens one by one gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import testing
from dflash_jax.block import chain_block, tree_block
from dflash_jax.cache import (
    KVCache,
    TargetCache,
    cache_bytes,
    commit,
    draft_cache,
    extend_context,
    grow,
    prefix,
    target_cache,
)

B, T, SLOTS = 2, 6, 24
CONFIG = testing.target_config()

MODELS = testing.make_models(CONFIG)


@jax.jit
def forward(tokens, parents, cache):
    block = tree_block(tokens, parents)
    return MODELS.target.apply({"params": MODELS.target_params}, block, cache)


@jax.jit
def step(token, count, cache):
    """Feed one token to the rows whose count is 1."""
    output = MODELS.target.apply({"params": MODELS.target_params}, chain_block(token[:, None]), cache)
    return commit(cache, output.trail, jnp.zeros((B, 1), jnp.int32), count)


@functools.cache
def start() -> TargetCache:
    """3 positions committed in row 0, 2 in row 1."""
    cache = target_cache(CONFIG, B, SLOTS, jnp.float32)
    for token, count in (([1, 2], [1, 1]), ([3, 4], [1, 1]), ([5, 0], [1, 0])):
        cache = step(jnp.asarray(token, jnp.int32), jnp.asarray(count, jnp.int32), cache)
    return cache


def committed(cache, row: int) -> list[np.ndarray]:
    length = int(cache.length[row])
    return [np.asarray(x)[row, :, :length] for layer in cache.layers for x in (layer.k, layer.v)]


def assert_same(one, two, atol: float = 1e-5) -> None:
    np.testing.assert_array_equal(one.length, two.length)
    for row in range(B):
        for a, b in zip(committed(one, row), committed(two, row), strict=True):
            np.testing.assert_allclose(a, b, atol=atol)


def root_path(parents: np.ndarray, node: int) -> list[int]:
    return [] if node < 0 else [*root_path(parents, int(parents[node])), node]


@st.composite
def trees(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """Parents [B, T], and per row a node whose path is committed, -1 for nothing."""
    parents = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, T)] for _ in range(B)]
    return np.array(parents, np.int32), [draw(st.integers(-1, T - 1)) for _ in range(B)]


def check_path(parents: np.ndarray, ends: list[int]) -> None:
    tokens = (np.arange(B * T).reshape(B, T) * 7 + 1) % testing.VOCAB
    tokens = jnp.asarray(tokens, jnp.int32)
    trail = forward(tokens, jnp.asarray(parents), start()).trail
    paths = [root_path(parents[row], ends[row]) for row in range(B)]
    count = np.array([len(path) for path in paths], np.int32)
    # What follows the path may be anything in range.
    path = np.array([[*path, T - 1, 0, 3, 1, 2, 4][:T] for path in paths], np.int32)
    selected = commit(start(), trail, jnp.asarray(path), jnp.asarray(count))
    one_by_one = start()
    for i in range(count.max()):
        token = np.array([tokens[row, path[row, i]] for row in range(B)], np.int32)
        one_by_one = step(jnp.asarray(token), jnp.asarray(i < count, jnp.int32), one_by_one)
    assert_same(selected, one_by_one)


@pytest.mark.parametrize("count", range(T + 1))
def test_every_count_of_a_chain(count: int) -> None:
    parents = np.tile(np.arange(-1, T - 1, dtype=np.int32), (B, 1))
    check_path(parents, [count - 1, T - 1 - count])


@given(trees())
def test_every_path_of_a_tree(tree: tuple[np.ndarray, list[int]]) -> None:
    check_path(*tree)


def test_commit_leaves_the_old_cache_alone() -> None:
    before = jax.tree.map(np.array, start())
    trail = forward(jnp.ones((B, T), jnp.int32), jnp.zeros((B, T), jnp.int32).at[:, 0].set(-1), start()).trail
    commit(start(), trail, jnp.zeros((B, 1), jnp.int32), jnp.ones(B, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, before, start())


def test_nothing_beyond_the_length_is_read() -> None:
    """Garbage in every unused slot: the next forward and the next commit are the same, to the last bit."""

    def poisoned(x: jax.Array) -> jax.Array:
        unused = jnp.arange(SLOTS)[None, None, :, None] >= start().length[:, None, None, None]
        return jnp.where(unused, 1e30, x)

    dirty = start().replace(
        layers=tuple(KVCache(poisoned(layer.k), poisoned(layer.v)) for layer in start().layers)
    )
    tokens = jnp.asarray(np.arange(B * T).reshape(B, T) % testing.VOCAB, jnp.int32)
    parents = jnp.asarray([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 3, 4]], jnp.int32)
    clean_out, dirty_out = forward(tokens, parents, start()), forward(tokens, parents, dirty)
    np.testing.assert_array_equal(clean_out.logits, dirty_out.logits)
    path = jnp.asarray([[0, 1, 3], [0, 1, 2]], jnp.int32)
    count = jnp.asarray([3, 2], jnp.int32)
    assert_same(commit(start(), clean_out.trail, path, count), commit(dirty, dirty_out.trail, path, count), 0)


def rows_of(*shape: int) -> KVCache:
    values = jnp.arange(float(np.prod(shape)), dtype=jnp.float32).reshape(shape)
    return KVCache(values, -values)


def test_extend_context_appends_at_each_rows_length() -> None:
    config = testing.draft_config(CONFIG)
    empty = draft_cache(config, B, SLOTS, jnp.float32)
    rows = (rows_of(B, config.num_kv_heads, 4, config.head_dim),) * config.num_layers
    once = extend_context(empty, rows, jnp.asarray([3, 1], jnp.int32))
    twice = extend_context(once, rows, jnp.asarray([2, 4], jnp.int32))
    assert np.asarray(once.length).tolist() == [3, 1] and np.asarray(twice.length).tolist() == [5, 5]
    source = np.asarray(rows[0].k)
    for layer in twice.layers:
        np.testing.assert_array_equal(layer.k[0, :, :5], source[0][:, [0, 1, 2, 0, 1]])
        np.testing.assert_array_equal(layer.k[1, :, :5], source[1][:, [0, 0, 1, 2, 3]])
        np.testing.assert_array_equal(layer.v[0, :, :5], -source[0][:, [0, 1, 2, 0, 1]])


def test_grow_keeps_what_is_there() -> None:
    wider = grow(start(), 40)
    assert all(layer.slots == 40 for layer in wider.layers)
    assert_same(start(), wider, 0)
    assert all(layer.slots == SLOTS for layer in grow(start(), 5).layers), "never shrinks"
    assert all(layer.slots == SLOTS for layer in start().layers)


def test_prefix_is_the_first_slots() -> None:
    short = prefix(start(), 5)
    assert all(layer.slots == 5 for layer in short.layers)
    assert_same(start(), short, 0)
    assert prefix(start(), SLOTS) is start() and prefix(start(), 1000) is start()
    tokens = jnp.ones((B, T), jnp.int32)
    parents = jnp.asarray(np.tile(np.arange(-1, T - 1), (B, 1)), jnp.int32)
    np.testing.assert_allclose(
        forward(tokens, parents, short).logits, forward(tokens, parents, start()).logits, atol=1e-5
    )


def test_bytes() -> None:
    cache = target_cache(CONFIG, B, SLOTS, jnp.bfloat16)
    held = sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers)
    assert cache_bytes(CONFIG, B, SLOTS, 2) == held


def test_what_is_not_kept_never_reaches_the_cache() -> None:
    """NaN in nodes that are not on the path, and behind the path: every slot stays finite (case 18)."""
    left = KVCache(jnp.full((B, 2, T, 16), jnp.nan), jnp.full((B, 2, T, 16), jnp.nan))
    count = jnp.asarray([2, 0], jnp.int32)
    left = jax.tree.map(lambda x: x.at[0, :, jnp.asarray([0, 3])].set(5.0), left)
    path = jnp.asarray([[0, 3, 1, 2], [4, 4, 4, 4]], jnp.int32)
    after = commit(start(), (left,) * len(start().layers), path, count)
    for old, new in zip(start().layers, after.layers, strict=True):
        at = int(start().length[0])
        assert np.isfinite(new.k).all() and np.isfinite(new.v).all()
        np.testing.assert_array_equal(new.v[0, :, at : at + 2], 5.0)
        np.testing.assert_array_equal(new.v[1, :, : start().length[1]], old.v[1, :, : start().length[1]])
