"""Loss and metrics against a plain version in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import loss as losses

ROWS, WIDTH, VOCAB = 10, 6, 17


def batched(x: np.ndarray) -> jax.Array:
    """[R, ...] as two sequences of R / 2 rows, which is what a step scores."""
    return jnp.asarray(x).reshape(2, ROWS // 2, *x.shape[1:])


def flat(x: jax.Array) -> np.ndarray:
    return np.asarray(x).reshape(ROWS, *x.shape[2:])


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


@pytest.mark.parametrize("chunk", [1, 4, 6, 10, 64])
def test_cross_entropy_and_its_gradient_in_any_chunks(numbers: dict[str, np.ndarray], chunk: int) -> None:
    table, labels = jnp.asarray(numbers["table"]), batched(numbers["labels"])

    def total(hidden: jax.Array) -> tuple[jax.Array, losses.Scores]:
        scores = losses.score(lambda x: x @ table.T, hidden, labels, chunk)
        return scores.loss.sum(), scores

    gradient, scores = jax.grad(total, has_aux=True)(batched(numbers["hidden"]))
    log_p = log_softmax(logits_of(numbers["table"], numbers["hidden"]))
    np.testing.assert_allclose(flat(scores.loss), -log_p[np.arange(ROWS), numbers["labels"]], rtol=1e-5)
    np.testing.assert_array_equal(flat(scores.rank) == 0, log_p.argmax(-1) == numbers["labels"])
    expected = (np.exp(log_p) - np.eye(VOCAB)[numbers["labels"]]) @ numbers["table"]
    np.testing.assert_allclose(flat(gradient), expected, rtol=1e-4, atol=1e-5)


def test_rank_counts_what_is_liked_better(numbers: dict[str, np.ndarray]) -> None:
    table, labels = jnp.asarray(numbers["table"]), batched(numbers["labels"])
    scores = losses.score(lambda x: x @ table.T, batched(numbers["hidden"]), labels, 4)
    order = np.argsort(-logits_of(numbers["table"], numbers["hidden"]), axis=-1)
    np.testing.assert_array_equal(flat(scores.rank), (order == numbers["labels"][:, None]).argmax(-1))


def test_a_candidate_set_holds_every_label_and_the_most_frequent() -> None:
    frequency = jnp.arange(VOCAB, dtype=jnp.float32) * 100
    chosen = losses.candidate_set(frequency, jnp.asarray([0, 3, 3, 16]), 6)
    assert chosen.tolist() == [0, 3, 13, 14, 15, 16]


def plain_dpace(loss: np.ndarray, entropy: np.ndarray, supervised: np.ndarray) -> tuple[float, int]:
    """ALGORITHMS 9, slot by slot."""
    total, sequences = 0.0, 0
    for row in range(loss.shape[0]):
        blocks = [a for a in range(loss.shape[1]) if supervised[row, a].any()]
        sequences += bool(blocks)
        part = 0.0
        for a in blocks:
            q = [
                0.5 * np.exp(-entropy[row, a, i]) + 0.5 if on else 1.0
                for i, on in enumerate(supervised[row, a])
            ]
            for j, on in enumerate(supervised[row, a]):
                reached = sum(np.prod(q[: m + 1]) for m in range(j, len(q)) if supervised[row, a, m])
                part += loss[row, a, j] * reached * on
        total += part / max(len(blocks), 1)
    return total, sequences


def test_dpace_is_its_formula() -> None:
    generator = np.random.default_rng(2)
    loss, entropy = generator.random((2, 3, 4, 5)).astype(np.float32)
    supervised = generator.random((3, 4, 5)) < 0.7
    supervised[1] = False  # a sequence without blocks counts neither above nor below
    top, bottom = losses.dpace(*map(jnp.asarray, (loss, entropy, supervised)))
    np.testing.assert_allclose([top, bottom], plain_dpace(loss, entropy, supervised), rtol=1e-5)
    weights = losses.dpace_weights(jnp.asarray(entropy), jnp.asarray(supervised))
    slope = jax.grad(lambda x: losses.dpace(x, x, jnp.asarray(supervised))[0])(jnp.asarray(entropy))
    blocks = supervised.any(-1).sum(-1)[:, None, None]
    np.testing.assert_allclose(slope, np.asarray(weights) / np.maximum(blocks, 1), rtol=1e-5)  # detached


def test_soft_labels_are_the_targets_distribution(numbers: dict[str, np.ndarray]) -> None:
    table, labels = jnp.asarray(numbers["table"]), batched(numbers["labels"])

    def head(x: jax.Array) -> jax.Array:
        return x @ table.T

    hidden, teacher = batched(numbers["hidden"]), batched(numbers["teacher"])

    def total(hidden: jax.Array) -> tuple[jax.Array, losses.Scores]:
        scores = losses.score(head, hidden, labels, 4, teacher, head, soft=0.25, soft_temperature=0.5)
        return scores.loss.sum(), scores

    gradient, scores = jax.grad(total, has_aux=True)(hidden)
    log_p = log_softmax(logits_of(numbers["table"], numbers["hidden"]))
    taught = np.exp(log_softmax(logits_of(numbers["table"], numbers["teacher"]) / 0.5))
    hard = -log_p[np.arange(ROWS), numbers["labels"]]
    np.testing.assert_allclose(flat(scores.loss), 0.75 * hard + 0.25 * -(taught * log_p).sum(-1), rtol=1e-5)
    wish = 0.75 * np.eye(VOCAB)[numbers["labels"]] + 0.25 * taught
    np.testing.assert_allclose(
        flat(gradient), (np.exp(log_p) - wish) @ numbers["table"], rtol=1e-4, atol=1e-5
    )


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
    rank = np.array([[[0, 0, 15], [0, 16, 0], [0, 0, 0]]])
    supervised = np.array([[[1, 1, 1], [1, 1, 1], [1, 1, 0]]], bool)  # the last block is cut
    arrays = map(jnp.asarray, (rank, supervised))
    total = losses.metrics(jnp.float32(6.0), jnp.float32(4.0), *arrays)
    summary = losses.summary(jax.tree.map(lambda x: x + x, total))  # sums of two batches
    assert summary["loss"] == 1.5
    assert summary["accuracy"] == pytest.approx([1.0, 2 / 3, 1 / 2])
    assert summary["recall16"] == pytest.approx([1.0, 2 / 3, 1.0])
    assert summary["tau_uniform"] == 1 + (2 + 1) / 2


def test_the_walk_jumps_by_what_was_accepted() -> None:
    accepted = np.zeros(20, np.int32)
    accepted[[5, 8, 9, 13]] = [2, 0, 3, 5]
    # Rounds at 5 (commits 6, 7, 8), 8 (9), 9 (10..13), 13 (14 and 15: the text ends at 16).
    assert losses.walk(accepted, 5, 16) == [3, 1, 4, 2]
    assert losses.walk(accepted, 15, 16) == []
