"""How many tokens a round would commit on held-out conversations.

Two figures: tau at uniform anchors (cheap, flattering: long accepted stretches hold many anchors) and
the walk, which starts at the answer and jumps by what was accepted, as decoding does (1.63 where
uniform anchors gave 1.77 on the same text). Checkpoints are chosen by the walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import loss as losses
from train.anchors import eligible
from train.data import Corpus
from train.step import Setup, predict


def accepted_lengths(
    setup: Setup, target_params: Any, params: Any, corpus: Corpus, batches: Iterable[np.ndarray], width: int
) -> tuple[np.ndarray, losses.Metrics]:
    """[N, width] leading matches of the block at every eligible position (0 elsewhere), and metrics over
    all of these blocks. Each batch holds row numbers of the corpus, all batches equally many."""
    accepted = np.zeros((len(corpus), width), np.int32)
    total: losses.Metrics | None = None
    for rows in batches:
        batch = corpus.batch(rows, width)
        possible = np.asarray(eligible(jnp.asarray(batch.supervised)))
        for anchors, keep in _slices(possible, setup.anchors):
            lengths, measured = predict(setup, target_params, params, batch, anchors, keep)
            row, column = np.nonzero(keep)
            accepted[np.asarray(rows)[row], anchors[row, column]] = np.asarray(lengths)[row, column]
            total = measured if total is None else jax.tree.map(jnp.add, total, measured)
    assert total is not None, "nothing to evaluate"
    return accepted, total


def _slices(possible: np.ndarray, count: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """All eligible positions of each row, `count` per slice."""
    order = np.argsort(~possible, axis=1, kind="stable").astype(np.int32)
    found = possible.sum(1)
    for first in range(0, int(found.max(initial=0)), count):
        index = first + np.arange(count)
        keep = index[None] < found[:, None]
        anchors = order[:, np.minimum(index, possible.shape[1] - 1)]
        yield np.where(keep, anchors, 0), keep


def walk_taus(corpus: Corpus, accepted: np.ndarray, rows: np.ndarray) -> list[list[int]]:
    """The rounds of the walk through each of these conversations."""
    width = accepted.shape[1]
    return [
        losses.walk(accepted[row], int(corpus.answer[row]), min(int(corpus.length[row]), width))
        for row in rows
    ]


def evaluate(
    setup: Setup, target_params: Any, params: Any, corpus: Corpus, size: int, width: int
) -> dict[str, Any]:
    """Loss, accuracy per slot, uniform tau and the walk, overall and by how the answer was sampled.
    size: sequences per batch; what is left over of the corpus is not evaluated (one compiled shape)."""
    rows = np.arange(len(corpus) - len(corpus) % size)
    batches = rows.reshape(-1, size)
    accepted, total = accepted_lengths(setup, target_params, params, corpus, batches, width)
    result: dict[str, Any] = dict(losses.summary(total))
    for name, chosen in (
        ("walk", rows),
        ("walk_greedy", rows[corpus.temperature[rows] == 0]),
        ("walk_sampled", rows[corpus.temperature[rows] > 0]),
    ):
        rounds = [n for text in walk_taus(corpus, accepted, chosen) for n in text]
        result[name] = float(np.mean(rounds)) if rounds else float("nan")
    return result
