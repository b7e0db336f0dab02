"""The gated delta rule: each node of a tree is its own root path, walked step by step (cases 21, 23, 24)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.cache import RecurrentState, States, Tape, commit_layer
from dflash_jax.gated_delta import CHUNK, convolve, delta_block, recur, states_of

B, HK, HV, U, W = 2, 2, 6, 5, 7
WIDTH, CHANNELS = 4, 3
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

block_form = jax.jit(delta_block)
states = jax.jit(states_of)
committed = jax.jit(commit_layer)


class Rows(NamedTuple):
    """What a layer gives the rule for T nodes, and the state before them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    s: jax.Array

    def along(self, nodes: list[int]) -> Rows:
        """These nodes as a chain, in both rows of the batch."""
        return Rows(*(x[:, jnp.asarray(nodes)] for x in self[:5]), self.s)


def rows(size: int, seed: int = 0, strongest: float = 2.0) -> Rows:
    """Random inputs whose log-decays reach -strongest. Keys are short enough for the 1e-6 to count."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return Rows(
        q=normal(B, size, HK, U),
        k=0.003 * normal(B, size, HK, U),
        v=normal(B, size, HV, W),
        g=jnp.asarray(-strongest * rng.random((B, size, HV)), jnp.float32),
        beta=jnp.asarray(rng.random((B, size, HV)), jnp.float32),
        s=normal(B, HV, U, W),
    )


def by_hand(rows: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, Hv, W] and states [T, Hv, U, W] of a chain in one row of the batch, in float64."""
    q, k, v, g, beta, s = (np.asarray(x[row], np.float64) for x in rows)
    heads = [
        reference.delta_rule(q[:, h // (HV // HK)], k[:, h // (HV // HK)], v[:, h], g[:, h], beta[:, h], s[h])
        for h in range(HV)
    ]
    return np.stack([o for o, _ in heads], axis=1), np.stack([after for _, after in heads], axis=1)


def both_by_hand(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The same with the batch in front."""
    outputs, states = zip(*(by_hand(rows, row) for row in range(B)), strict=True)
    return np.stack(outputs), np.stack(states)


def chain(size: int, valid: int | None = None) -> Block:
    tokens = jnp.zeros((B, size), jnp.int32)
    return chain_block(tokens, jnp.broadcast_to(jnp.arange(size) < (valid or size), (B, size)))


def random_tree(size: int, seed: int) -> Block:
    """Another tree in each row of the batch; nodes often continue the one before, so that paths are long."""
    rng = np.random.default_rng(seed)
    parents = [
        [-1, *(i - 1 if rng.random() < 0.6 else int(rng.integers(0, i)) for i in range(1, size))]
        for _ in range(B)
    ]
    return tree_block(jnp.zeros((B, size), jnp.int32), jnp.asarray(parents, jnp.int32))


def root_path(block: Block, row: int, node: int) -> list[int]:
    return [] if node < 0 else [*root_path(block, row, int(block.parents[row, node])), node]


def tape(parts: tuple[jax.Array, ...]) -> Tape:
    return Tape(*parts, conv=jnp.zeros((*parts[1].shape[:2], CHANNELS)))


def state_after(start: jax.Array, left: Tape | States, path: list[list[int]], count: int) -> jax.Array:
    layer = RecurrentState(start, jnp.zeros((B, WIDTH - 1, CHANNELS)))
    counts = jnp.full(B, count, jnp.int32)
    return committed(layer, left, jnp.asarray(path, jnp.int32), counts, counts).s


def test_step_by_step_is_the_rule() -> None:
    x = rows(9)
    o, s = jax.jit(recur)(*x)
    expected, after = both_by_hand(x)
    np.testing.assert_allclose(o, expected, **CLOSE)
    np.testing.assert_allclose(s, after[:, -1], **CLOSE)


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_node_of_a_tree_is_its_root_path(size: int, seed: int) -> None:
    """Output, saved state, and the state that a commit of the path makes from the tape."""
    x, block = rows(size, seed), random_tree(size, seed)
    o, parts = block_form(*x, block)
    saved = states(parts, x.s, block)
    for row in range(B):
        for node in range(size):
            path = root_path(block, row, node)
            expected, after = by_hand(x.along(path), row)
            np.testing.assert_allclose(o[row, node], expected[-1], **CLOSE)
            np.testing.assert_allclose(saved[row, node], after[-1], **CLOSE)
            padded = [path + [0] * (size - len(path))] * B
            for left in (tape(parts), States(saved, tape(parts).conv)):
                s = state_after(x.s, left, padded, len(path))
                np.testing.assert_allclose(s[row], after[-1], **CLOSE)


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_long_chains_go_by_chunks(size: int) -> None:
    """Outputs of all rows, and the state at counts on both sides of every seam."""
    x, block = rows(size, 3, strongest=0.2), chain(size)
    expected, after = both_by_hand(x)
    o, parts = block_form(*x, block)
    np.testing.assert_allclose(o, expected, **CLOSE)
    for count in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, size):
        if count <= size:
            s = state_after(x.s, tape(parts), [list(range(size))] * B, count)
            np.testing.assert_allclose(s, after[:, count - 1], **CLOSE)


def test_chunks_and_one_solve_agree() -> None:
    """The same chain, not known to be one, is solved whole: outputs and tape are equal."""
    size = 2 * CHUNK + 3
    x, block = rows(size, 4, strongest=0.1), chain(size)
    whole, parts = block_form(*x, block.replace(chain=False))
    o, chunked = block_form(*x, block)
    np.testing.assert_allclose(o, whole, **CLOSE)
    for ours, theirs in zip(chunked, parts, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.mark.parametrize("size", [12, CHUNK + 12])
def test_padding_neither_decays_nor_writes(size: int) -> None:
    """Case 24: whatever padding holds, the state after the chunk is the state after its last valid row."""
    x, count = rows(size, 5, strongest=0.3), size - 7
    x = x._replace(
        **{name: getattr(x, name).at[:, count:].set(9.0) for name in ("q", "k", "v", "beta")},
        g=x.g.at[:, count:].set(-9.0),
    )
    o, parts = block_form(*x, chain(size, count))
    expected, after = both_by_hand(x.along(list(range(count))))
    np.testing.assert_allclose(o[:, :count], expected, **CLOSE)
    for last in (count, size):  # as if padding had been committed too
        s = state_after(x.s, tape(parts), [list(range(size))] * B, last)
        np.testing.assert_allclose(s, after[:, -1], **CLOSE)


def test_strong_decay_and_its_gradient_are_finite() -> None:
    """Two branches of a tree that have decayed by e^-300 and e^-3: the ratio from one to the other is no
    float32, and nothing may look at it."""
    x = rows(6, 6)
    block = tree_block(jnp.zeros((B, 6), jnp.int32), jnp.asarray([[-1, 0, 1, 0, 3, 4]] * B, jnp.int32))
    x = x._replace(g=x.g.at[:, 1:3].set(-150.0))

    def total(inputs: Rows) -> jax.Array:
        o, parts = delta_block(*inputs, block)
        return jnp.sum(o**2) + jnp.sum(states_of(parts, inputs.s, block) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(total))(x)
    assert np.isfinite(value)
    assert all(np.isfinite(part).all() for part in gradient)
    o, _ = block_form(*x, block)
    expected, _ = both_by_hand(x.along([0, 3, 4, 5]))
    np.testing.assert_allclose(o[:, 5], expected[:, -1], **CLOSE)


def test_training_through_chunks_has_the_gradients_of_the_recurrence() -> None:
    size = CHUNK + 5
    x, block = rows(size, 11, strongest=0.3), chain(size)
    weight = jnp.asarray(np.random.default_rng(12).standard_normal((B, size, HV, W)), jnp.float32)

    def ours(inputs: Rows) -> jax.Array:
        return jnp.sum(weight * delta_block(*inputs, block)[0])

    def theirs(inputs: Rows) -> jax.Array:
        return jnp.sum(weight * recur(*inputs)[0])

    found, expected = (jax.jit(jax.grad(loss))(x) for loss in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_bfloat16_inputs_keep_a_float32_state() -> None:
    """Case 23: what comes out is what float32 makes of the rounded inputs."""
    x = rows(8, 7)
    narrow = Rows(*(part.astype(jnp.bfloat16) for part in x[:5]), x.s)
    o, parts = block_form(*narrow, chain(8))
    assert o.dtype == states(parts, x.s, chain(8)).dtype == jnp.float32
    assert all(part.dtype == jnp.float32 for part in parts)
    wide = Rows(*(part.astype(jnp.float32) for part in narrow[:5]), x.s)
    np.testing.assert_allclose(o, both_by_hand(wide)[0], **CLOSE)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_convolution_follows_the_root_path(size: int) -> None:
    """Node i reads itself and its three nearest ancestors; above the root, the inputs before the block."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((B, size, CHANNELS)).astype(np.float32)
    before = rng.standard_normal((B, WIDTH - 1, CHANNELS)).astype(np.float32)
    weight = rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32)
    for block in (chain(size), random_tree(size, 9), random_tree(size, 10)):
        out = jax.jit(partial(convolve, block=block))(x, before, weight)
        assert out.dtype == jnp.float32
        for row in range(B):
            for node in range(size):
                read = np.concatenate([before[row], x[row, root_path(block, row, node)]])[-WIDTH:]
                np.testing.assert_allclose(out[row, node], (read.T * weight).sum(-1), **CLOSE)
