"""Conversations as arrays, and the batches that are cut from them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.config import ConfigError
from train import data

TALK = [([1, 2], [3, 4, 5], 0.0), ([1, 2], [6], 0.0), ([1, 2, 3], [7, 8], 0.5), ([1, 2], [9, 9], 0.5)]


def test_short_answers_are_dropped_with_a_count_and_the_rest_keeps_its_place() -> None:
    corpus, dropped = data.corpus(TALK)
    assert dropped == 1 and len(corpus) == 3
    batch = corpus.batch(np.array([0, 1]), 6)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 7, 8, 0]]
    assert batch.valid.sum(1).tolist() == [5, 5]
    assert [np.nonzero(row)[0].tolist() for row in batch.supervised] == [[2, 3, 4], [3, 4]]
    assert corpus.batch(np.array([0]), 4).supervised.tolist() == [[False, False, True, True]]  # cut
    with pytest.raises(ConfigError, match="two tokens"):
        data.corpus(TALK[1:2])


def test_saved_and_joined_equals_made(tmp_path: Path) -> None:
    corpus, _ = data.corpus(TALK)
    wider, _ = data.corpus([([5] * 9, [70000, 2], 0.0)])
    joined = data.join([corpus, wider])
    assert joined.tokens.shape == (4, 11)
    for made in (corpus, joined):
        data.save(tmp_path / "x.npz", made)
        read = data.load(tmp_path / "x.npz")
        for name in ("tokens", "answer", "length", "temperature"):
            np.testing.assert_array_equal(getattr(read, name), getattr(made, name))


def test_answers_to_one_prompt_stay_on_one_side() -> None:
    corpus, _ = data.corpus([([1, n // 2], [n, n], 0.0) for n in range(100)])
    fit, held = data.split(corpus, 0.1, 0)
    assert (len(fit), len(held)) == (90, 10)
    assert not set(fit.tokens[:, 1]) & set(held.tokens[:, 1])


def test_batches_cover_each_epoch_once_in_the_narrowest_width() -> None:
    lengths = [3] * 7 + [6] * 5 + [12] * 2
    corpus, _ = data.corpus([([1], [n + 2] * (length - 1), 0.0) for n, length in enumerate(lengths)])
    seen: dict[int, list[int]] = {0: [], 1: []}
    widths = set()
    for epoch, width, rows in islice(data.epochs(corpus, [4, 8], 16, 0), 8):
        widths.add(width)
        assert len(rows) == 16 // width
        assert all(corpus.length[row] <= width or width == 8 for row in rows)
        seen[epoch] += rows.tolist()
    assert widths == {4, 8}
    for rows in seen.values():  # 4 of the 7 short ones, 6 of the 7 long ones
        assert len(rows) == len(set(rows)) == 10
    assert seen[0] != seen[1]
    with pytest.raises(ConfigError, match="do not fill"):
        next(data.epochs(corpus, [4], 1000, 0))
