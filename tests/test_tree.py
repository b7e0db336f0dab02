"""The tree is the set that ranking every prefix by brute force gives, in the documented order; its first nodes
are the smaller trees; padding harms nothing."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.config import ConfigError
from dflash_jax.tree import TreeShape, draft_chain, draft_tree, first_nodes, top_k

ANCHOR = jnp.asarray([7, 3], jnp.int32)


def draw_logits(seed: int, depths: int, vocab: int, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (2, depths, vocab)).astype(np.float32)


def paths(block, row: int) -> list[tuple[int, ...]]:
    """The candidates from the root of every valid node, in node order."""
    tokens, parents = np.asarray(block.tokens)[row], np.asarray(block.parents)[row]
    valid, found = np.asarray(block.valid)[row], [()]
    for i in range(1, len(tokens)):
        assert parents[i] < i
        found.append((*found[parents[i]], int(tokens[i])))
    return [path for path, real in zip(found, valid, strict=True) if real][1:]


def ranked(logits: np.ndarray, shape: TreeShape) -> list[tuple[int, ...]]:
    """Every prefix of one row by weight (float32 sums, as on the device), the chain first if seeded."""
    logp = np.asarray(jax.nn.log_softmax(jnp.asarray(logits) / shape.temperature, axis=-1))
    depths, vocab = logits.shape
    weights = {}
    for depth in range(1, depths + 1):
        for path in itertools.product(range(vocab), repeat=depth):
            total = np.float32(0)
            for i, token in enumerate(path):
                total = np.float32(total + logp[i, token])
            weights[path] = total
    best = tuple(int(logp[i].argmax()) for i in range(depths))
    chain = [best[: i + 1] for i in range(depths)] if shape.chain_seed else []
    rest = sorted((path for path in weights if path not in chain), key=lambda path: -weights[path])
    return [*chain, *rest][: shape.budget]


grow = jax.jit(draft_tree, static_argnames="shape")


@pytest.mark.parametrize(
    ("depths", "vocab", "shape"),
    [
        (1, 5, TreeShape(3)),
        (3, 4, TreeShape(1)),
        (4, 3, TreeShape(24)),
        (3, 5, TreeShape(12, temperature=2.5)),
        (4, 5, TreeShape(9, chain_seed=True)),
        (4, 2, TreeShape(4, chain_seed=True)),
        (2, 3, TreeShape(12, chain_seed=True, temperature=0.5)),
    ],
)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 2.0, 8.0]))
def test_tree_is_the_heaviest_prefixes(
    depths: int, vocab: int, shape: TreeShape, seed: int, scale: float
) -> None:
    logits = draw_logits(seed, depths, vocab, scale)
    seeded = shape.chain_seed
    found = grow(ANCHOR, jnp.asarray(logits), shape)
    assert found.block.tokens.shape == (2, shape.budget + 1)
    for row in range(2):
        mine = paths(found.block, row)
        assert len(set(mine)) == len(mine), "no duplicate children"
        assert int(found.block.tokens[row, 0]) == int(ANCHOR[row])
        expected = ranked(logits[row], shape)
        assert set(mine) == set(expected)
        order = [np.float32(w) for w in np.asarray(found.weight)[row, 1 : len(mine) + 1]]
        after = depths if seeded else 0
        assert order[after:] == sorted(order[after:], reverse=True)
        if seeded:
            assert mine[:depths] == expected[:depths]


def test_equal_weights_go_by_depth_parent_and_rank() -> None:
    """Uniform logits: every prefix of a depth weighs the same, and deeper ones less."""
    found = draft_tree(ANCHOR, jnp.zeros((2, 2, 3), jnp.float32), TreeShape(7))
    assert paths(found.block, 0) == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0)]


def test_certain_tokens_do_not_outrank_their_parents() -> None:
    """Log-probability 0: child and parent weigh the same."""
    logits = jnp.full((2, 3, 4), -1e9, jnp.float32).at[:, :, 2].set(0.0)
    found = draft_tree(ANCHOR, logits, TreeShape(3))
    assert paths(found.block, 1) == [(2,), (2, 2), (2, 2, 2)]
    np.testing.assert_array_equal(found.weight, np.zeros((2, 4)))


@given(seed=st.integers(0, 10**6), small=st.sampled_from([1, 5, 16]))
def test_first_nodes_are_the_smaller_tree(seed: int, small: int) -> None:
    logits = jnp.asarray(draw_logits(seed, 3, 6))
    large, exact = grow(ANCHOR, logits, TreeShape(17)), grow(ANCHOR, logits, TreeShape(small))
    first = first_nodes(large, small + 1)
    jax.tree.map(np.testing.assert_array_equal, (first.block, first.weight), (exact.block, exact.weight))


def test_a_budget_beyond_every_prefix_is_padded() -> None:
    """2 + 4 prefixes of a vocabulary of 2: the other rows are invalid, hang from the root and are finite."""
    found = draft_tree(ANCHOR, jnp.asarray(draw_logits(0, 2, 2)), TreeShape(9))
    assert np.asarray(found.block.valid).sum(-1).tolist() == [7, 7]
    assert len(paths(found.block, 0)) == 6
    assert not np.isnan(np.asarray(found.weight)).any()


def test_a_chain_is_the_tree_of_best_candidates() -> None:
    logits = draw_logits(5, 4, 9)
    chain = draft_chain(ANCHOR, jnp.asarray(logits), jnp.asarray(logits.argmax(-1), jnp.int32))
    np.testing.assert_array_equal(chain.block.tokens[:, 1:], logits.argmax(-1))
    logp = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1)).max(-1)
    np.testing.assert_allclose(chain.weight[:, 1:], np.cumsum(logp, axis=1), rtol=1e-5)
    seeded = draft_tree(ANCHOR, jnp.asarray(logits), TreeShape(4, chain_seed=True))
    np.testing.assert_array_equal(seeded.block.tokens, chain.block.tokens)
    np.testing.assert_array_equal(seeded.block.ancestors, chain.block.ancestors)


@pytest.mark.parametrize(("vocab", "k"), [(11, 11), (4096, 16), (49152, 64), (5000, 22)])
def test_top_k_is_the_sort(vocab: int, k: int) -> None:
    x = draw_logits(vocab, 3, vocab)
    x[0, 0] = np.round(x[0, 0])  # many equal values: the values still agree
    value, index = top_k(jnp.asarray(x), k)
    np.testing.assert_array_equal(value, -np.sort(-x, axis=-1)[..., :k])
    np.testing.assert_array_equal(np.take_along_axis(x, np.asarray(index), -1), value)
    assert all(len(set(row.tolist())) == k for row in np.asarray(index).reshape(-1, k))
    np.testing.assert_array_equal(index[1], np.argsort(-x[1], axis=-1, kind="stable")[..., :k])


def test_shapes_that_cannot_be_are_refused() -> None:
    for bad in ({"budget": 0}, {"budget": 4, "temperature": 0.0}, {"budget": 4, "temperature": math.nan}):
        with pytest.raises(ConfigError):
            TreeShape(**bad)
    with pytest.raises(ConfigError, match="no room"):
        TreeShape(4, chain_seed=True).check_block(6)
    TreeShape(5, chain_seed=True).check_block(6)
