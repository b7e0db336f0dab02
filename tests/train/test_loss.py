"""Loss and metrics against a plain version in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import loss as losses

ROWS, WIDTH, VOCAB = 10, 6, 17


def logits_of(table: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    return np.asarray(hidden, np.float64) @ table.T


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture
def numbers() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "table": generator.normal(size=(VOCAB, WIDTH)).astype(np.float32),
        "hidden": generator.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "teacher": generator.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "labels": generator.integers(0, VOCAB, ROWS).astype(np.int32),
    }


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_cross_entropy_and_its_gradient_in_any_chunks(numbers: dict[str, np.ndarray], chunk: int) -> None:
    table, labels = jnp.asarray(numbers["table"]), jnp.asarray(numbers["labels"])

    def total(hidden: jax.Array) -> tuple[jax.Array, losses.Scores]:
        scores = losses.score(lambda x: x @ table.T, hidden, labels, chunk)
        return scores.loss.sum(), scores

    gradient, scores = jax.grad(total, has_aux=True)(jnp.asarray(numbers["hidden"]))
    log_p = log_softmax(logits_of(numbers["table"], numbers["hidden"]))
    np.testing.assert_allclose(scores.loss, -log_p[np.arange(ROWS), numbers["labels"]], rtol=1e-5)
    np.testing.assert_array_equal(scores.best, log_p.argmax(-1))
    expected = (np.exp(log_p) - np.eye(VOCAB)[numbers["labels"]]) @ numbers["table"]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_soft_labels_are_the_targets_distribution(numbers: dict[str, np.ndarray]) -> None:
    table, labels = jnp.asarray(numbers["table"]), jnp.asarray(numbers["labels"])

    def head(x: jax.Array) -> jax.Array:
        return x @ table.T

    hidden, teacher = jnp.asarray(numbers["hidden"]), jnp.asarray(numbers["teacher"])
    scores = losses.score(head, hidden, labels, 4, teacher, head, soft=0.25, soft_temperature=0.5)
    log_p = log_softmax(logits_of(numbers["table"], numbers["hidden"]))
    taught = np.exp(log_softmax(logits_of(numbers["table"], numbers["teacher"]) / 0.5))
    hard = -log_p[np.arange(ROWS), numbers["labels"]]
    np.testing.assert_allclose(scores.loss, 0.75 * hard + 0.25 * -(taught * log_p).sum(-1), rtol=1e-5)


def test_weights_decay_and_denominators_stay_apart() -> None:
    assert [losses.default_gamma(c) for c in (16, 10, 8, 4, 20)] == [7, 5, 4, 2, 7]
    np.testing.assert_allclose(losses.decay_weights(4, 2.0), np.exp([0, -0.5, -1.0]), rtol=1e-6)
    generator = np.random.default_rng(1)
    loss = generator.random((2, 3, 3)).astype(np.float32)
    supervised = generator.random((2, 3, 3)) < 0.6
    top, bottom = losses.weighted(jnp.asarray(loss), jnp.asarray(supervised), 2.0)
    weights = np.exp(-np.arange(3) / 2.0) * supervised
    np.testing.assert_allclose([top, bottom], [(loss * weights).sum(), weights.sum()], rtol=1e-6)


def test_metrics_count_complete_blocks_and_supervised_slots() -> None:
    labels = np.array([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]])
    best = np.array([[[1, 2, 0], [4, 0, 6], [7, 8, 9]]])
    supervised = np.array([[[1, 1, 1], [1, 1, 1], [1, 1, 0]]], bool)  # the last block is cut
    total = losses.metrics(jnp.float32(6.0), jnp.float32(4.0), *map(jnp.asarray, (best, labels, supervised)))
    summary = losses.summary(jax.tree.map(lambda x: x + x, total))  # sums of two batches
    assert summary["loss"] == 1.5
    assert summary["accuracy"] == pytest.approx([1.0, 2 / 3, 1 / 2])
    assert summary["tau_uniform"] == 1 + (2 + 1) / 2


def test_the_walk_jumps_by_what_was_accepted() -> None:
    accepted = np.zeros(20, np.int32)
    accepted[[5, 8, 9, 13]] = [2, 0, 3, 5]
    # Rounds at 5 (commits 6, 7, 8), 8 (9), 9 (10..13), 13 (14 and 15: the text ends at 16).
    assert losses.walk(accepted, 5, 16) == [3, 1, 4, 2]
    assert losses.walk(accepted, 15, 16) == []
