"""Blocks: ancestors and depths are what walking up the parents says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.block import Block, chain_block, tree_block, visible

SIZES = (1, 2, 5, 9)  # few shapes: each one compiles


@st.composite
def trees(draw: st.DrawFn) -> np.ndarray:
    """Parents [2, T] of two random trees."""
    size = draw(st.sampled_from(SIZES))
    rows = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)] for _ in range(2)]
    return np.array(rows, np.int32)


def walk(parents: np.ndarray, node: int) -> set[int]:
    """The node and its ancestors."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = int(parents[node])
    return seen


def block_of(parents: np.ndarray, valid: np.ndarray | None = None) -> Block:
    tokens = jnp.zeros(parents.shape, jnp.int32)
    return tree_block(tokens, jnp.asarray(parents), None if valid is None else jnp.asarray(valid))


@given(trees())
def test_tree_equals_walking_up(parents: np.ndarray) -> None:
    block = block_of(parents)
    size = parents.shape[1]
    for row in range(2):
        for node in range(size):
            up = walk(parents[row], node)
            assert np.flatnonzero(block.ancestors[row, node]).tolist() == sorted(up)
            assert int(block.depth[row, node]) == len(up) - 1
    assert bool(block.valid.all())
    assert block.size == size


@given(st.sampled_from(SIZES))
def test_chain_is_the_tree_with_one_branch(size: int) -> None:
    tokens = jnp.arange(2 * size, dtype=jnp.int32).reshape(2, size)
    parents = np.tile(np.arange(-1, size - 1, dtype=np.int32), (2, 1))
    chain, tree = chain_block(tokens), tree_block(tokens, jnp.asarray(parents))
    for name in ("tokens", "parents", "depth", "ancestors", "valid"):
        one, two = getattr(chain, name), getattr(tree, name)
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two, err_msg=name)


def test_depth_of_a_chain_longer_than_the_squarings_of_half_of_it() -> None:
    """17 nodes need 5 squarings: one fewer would lose the deepest pair."""
    parents = np.arange(-1, 16, dtype=np.int32)[None]
    block = block_of(parents)
    assert np.asarray(block.depth[0]).tolist() == list(range(17))
    assert bool(block.ancestors[0, 16, 0])


@given(trees(), st.integers(0, 2**18 - 1))
def test_nobody_sees_padding_and_padding_sees_itself(parents: np.ndarray, bits: int) -> None:
    size = parents.shape[1]
    valid = np.array([[(bits >> (row * size + i)) & 1 for i in range(size)] for row in range(2)], bool)
    valid[:, 0] = True
    mask = np.asarray(visible(block_of(parents, valid)))
    assert mask.any(-1).all(), "a row that sees nothing is NaN in a softmax"
    for row in range(2):
        for i in range(size):
            expected = {j for j in walk(parents[row], i) if valid[row, j]} | {i}
            assert np.flatnonzero(mask[row, i]).tolist() == sorted(expected)
