"""Anchors and blocks against a plain version in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from train.anchors import chunk_starts, eligible, layout, sample_anchors

SUPERVISED = np.array(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 1, 1, 1, 1, 1],  # a gap
        [0, 0, 0, 0, 1, 0, 0, 1, 0, 0],  # lone tokens: nothing to start from
    ],
    bool,
)
ELIGIBLE = [[3, 4, 5, 6], [1, 5, 6, 7, 8], []]


def test_eligible_positions_have_a_supervised_successor() -> None:
    found = np.asarray(eligible(jnp.asarray(SUPERVISED)))
    assert [np.nonzero(row)[0].tolist() for row in found] == ELIGIBLE


def test_anchors_are_distinct_eligible_and_ascending_then_padding() -> None:
    for seed in range(20):
        anchors, keep = sample_anchors(jax.random.key(seed), eligible(jnp.asarray(SUPERVISED)), 4)
        for row, kept, possible in zip(np.asarray(anchors), np.asarray(keep), ELIGIBLE, strict=True):
            real = row[kept].tolist()
            assert len(real) == min(4, len(possible)) and set(real) <= set(possible)
            assert real == sorted(set(real))
            assert not row[~kept].any() and kept.tolist() == sorted(kept, reverse=True)


def test_more_anchors_than_positions_are_padding() -> None:
    anchors, keep = sample_anchors(jax.random.key(0), eligible(jnp.asarray(SUPERVISED)), 13)
    assert anchors.shape == keep.shape == (3, 13)
    assert np.asarray(keep).sum(1).tolist() == [4, 5, 0]


def test_every_eligible_position_is_drawn_equally_often() -> None:
    keys = jax.random.split(jax.random.key(3), 4000)
    draw = jax.jit(jax.vmap(lambda key: sample_anchors(key, eligible(jnp.asarray(SUPERVISED[:1])), 2)[0][0]))
    counts = np.bincount(np.asarray(draw(keys)).ravel(), minlength=7)[3:7]
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.02)


def test_layout_is_the_plain_one() -> None:
    tokens = np.arange(100, 130).reshape(3, 10)
    anchors = np.array([[3, 6, 0], [1, 5, 8], [0, 0, 0]])
    keep = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    size, mask = 4, 3
    blocks = layout(*map(jnp.asarray, (tokens, SUPERVISED, anchors, keep)), size, mask)
    for b, a in np.ndindex(anchors.shape):
        p = anchors[b, a]
        assert np.asarray(blocks.inputs[b, a]).tolist() == [tokens[b, p], mask, mask, mask]
        for k in range(1, size):
            counts = bool(keep[b, a] and p + k < 10 and SUPERVISED[b, p + k])
            assert bool(blocks.supervised[b, a, k - 1]) == counts
            if counts:
                assert blocks.labels[b, a, k - 1] == tokens[b, p + k]
    # A gap silences its own slots only: anchor 1 of row 1 has slots 2, 3 (gap), 4 (gap).
    assert np.asarray(blocks.supervised[1, 0]).tolist() == [True, False, False]
    assert blocks.size == size


def test_fixed_chunks_start_at_every_size_th_answer_token() -> None:
    supervised = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1]], bool)  # a gap is not counted
    assert np.nonzero(chunk_starts(jnp.asarray(supervised), 3)[0])[0].tolist() == [2, 5, 9]
