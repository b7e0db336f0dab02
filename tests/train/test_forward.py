"""Training sees what decoding sees: the most important property of the training code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DRAFT, DRAFTS, draft_config

from dflash_jax.cache import KVCache, draft_cache
from dflash_jax.config import DraftConfig
from dflash_jax.drafts import DFlash, init_params
from train import forward
from train.forward import Visibility, attend_blocks, hidden_states, in_groups

S, BATCH = 24, 2
ANCHORS = jnp.array([[1, 2, 7, 19], [3, 8, 20, 23]], jnp.int32)


def inputs(config: DraftConfig) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 2)
    features = jax.random.normal(keys[0], (BATCH, S, len(config.taps) * config.hidden_size))
    shape = (BATCH, ANCHORS.shape[1], config.block_size, config.hidden_size)
    return features, jax.random.normal(keys[1], shape)


@pytest.mark.parametrize("name", DRAFTS)
def test_equals_the_decoding_draft_on_a_cache_of_the_positions_before_the_anchor(name: str) -> None:
    config = DRAFTS[name]
    draft, params = DFlash(config), init_params(config, jax.random.key(0))
    features, embeddings = inputs(config)
    got = hidden_states(draft, params, features, embeddings, ANCHORS)
    apply = jax.jit(draft.apply, static_argnames="method")
    for b in range(BATCH):
        for a, anchor in enumerate(np.asarray(ANCHORS[b])):
            empty = draft_cache(config, 1, S + config.block_size, jnp.float32)
            count = jnp.array([anchor], jnp.int32)  # features of positions 0 .. anchor-1, no more
            cache = apply({"params": params}, empty, features[b : b + 1], count, method="extend")
            expected = apply({"params": params}, cache, embeddings[b : b + 1, a], method="propose")
            np.testing.assert_allclose(got[b, a], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", DRAFTS)
def test_features_at_and_after_the_anchor_change_nothing(name: str) -> None:
    config = DRAFTS[name]
    draft, params = DFlash(config), init_params(config, jax.random.key(0))
    features, embeddings = inputs(config)
    base = hidden_states(draft, params, features, embeddings, ANCHORS)
    anchor = int(ANCHORS[0, 2])
    after = features.at[0, anchor:].add(1.0)
    before = features.at[0, anchor - 1].add(1.0)
    same = hidden_states(draft, params, after, embeddings, ANCHORS)
    other = hidden_states(draft, params, before, embeddings, ANCHORS)
    np.testing.assert_array_equal(same[0, :3], base[0, :3])
    assert not np.allclose(other[0, 2], base[0, 2], atol=1e-4)
    np.testing.assert_array_equal(other[0, :2], base[0, :2])  # an earlier anchor does not see it either
    np.testing.assert_array_equal(other[1], base[1])


def test_blocks_do_not_see_each_other() -> None:
    draft, params = DFlash(DRAFT), init_params(DRAFT, jax.random.key(0))
    features, embeddings = inputs(DRAFT)
    base = hidden_states(draft, params, features, embeddings, ANCHORS)
    other = hidden_states(draft, params, features, embeddings.at[:, 1].add(1.0), ANCHORS)
    np.testing.assert_array_equal(np.delete(other, 1, axis=1), np.delete(base, 1, axis=1))
    assert not np.allclose(other[:, 1], base[:, 1], atol=1e-4)


@pytest.mark.parametrize(("dtype", "together"), [("float32", 6), ("bfloat16", 6), ("float32", 4)])
def test_attention_equals_one_dense_mask(dtype: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_GROUP", together)  # of 6 anchors: all at once, or 3 and 3
    heads, kv, size, count, head_dim = 4, 2, 3, 6, 8
    rows = count * size
    keys = jax.random.split(jax.random.key(2), 6)
    normal = jax.random.normal
    q = normal(keys[0], (BATCH, rows, heads, head_dim)).astype(dtype)
    own = KVCache(*(normal(k, (BATCH, kv, rows, head_dim)).astype(dtype) for k in keys[1:3]))
    context = KVCache(*(normal(k, (BATCH, kv, S, head_dim)).astype(dtype) for k in keys[3:5]))
    outside = jax.random.bernoulli(keys[5], 0.4, (BATCH, count, size, S))
    outside = outside.at[0, 0].set(False)  # a padding block sees itself only
    inside = jnp.tri(size, dtype=bool)[None, None]
    got = in_groups(attend_blocks, q, own, context, Visibility(outside, inside))

    block = np.kron(np.eye(count), np.ones((size, size))) * np.tile(np.tri(size), (count, count))
    mask = np.concatenate(
        [
            np.asarray(outside).reshape(BATCH, rows, S),
            np.broadcast_to(block.astype(bool), (BATCH, rows, rows)),
        ],
        axis=2,
    )
    keys_all = np.concatenate([context.k, own.k], axis=2, dtype=np.float64).repeat(heads // kv, axis=1)
    values_all = np.concatenate([context.v, own.v], axis=2, dtype=np.float64).repeat(heads // kv, axis=1)
    scores = np.einsum("bqnh,bnsh->bnqs", np.asarray(q, np.float64), keys_all) * head_dim**-0.5
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnqs,bnsh->bqnh", weights, values_all).reshape(BATCH, rows, -1)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance)


def test_gradients_are_finite_and_the_same_with_and_without_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = draft_config(num_layers=1)
    draft, params = DFlash(config), init_params(config, jax.random.key(0))
    features, embeddings = inputs(config)
    anchors = ANCHORS.at[0, 3].set(0)  # padding: no context at all

    def gradient(remat: bool) -> dict:
        return jax.grad(lambda p: (hidden_states(draft, p, features, embeddings, anchors, remat) ** 2).sum())(
            params
        )

    kept = gradient(False)
    monkeypatch.setattr(forward, "_GROUP", 2)
    recomputed = gradient(True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, recomputed)
