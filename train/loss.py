"""The objective and its metrics: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

RECALL = 16  # candidates per slot that a tree could hold
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's decay for its block sizes


def default_gamma(block_size: int) -> float:
    return GAMMAS.get(block_size, min(7.0, block_size / 2))


def decay_weights(block_size: int, gamma: float) -> Float[Array, " c"]:
    """w_k = exp(-(k-1) / gamma) for slots k = 1 .. C-1: a late slot counts only when all before it
    were accepted, so its errors cost less."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


@struct.dataclass
class Scores:
    """Per predicted row: the loss to minimise and the label's cross-entropy (both nats; equal without soft
    labels), and how many tokens the draft likes better than the label: 0 where it proposes the label."""

    loss: Array
    cross_entropy: Array
    rank: Array


def score(
    head: Callable[[Array], Array],
    hidden: Float[Array, "B R D"],
    labels: Int[Array, "B R"],
    chunk: int,
    teacher: Float[Array, "B R D"] | None = None,
    teacher_head: Callable[[Array], Array] | None = None,
    soft: float = 0.0,
    soft_temperature: float = 1.0,
) -> Scores:
    """Head and cross-entropy of B * R rows, about `chunk` rows at a time: the live logits are chunk * V
    floats whatever A and C are. A chunk has rows of every sequence, so that devices which share the batch
    share each chunk. Differentiable in `hidden`, and there only: `loss` is, the rest is detached.

    The head is frozen, so a row's gradient is known as soon as its loss is, (p - label) pulled back through
    the head: it is computed in the forward pass, R * D floats are kept, and no logits are recomputed (a
    rematerialised head multiplies three times by the table, this one twice).

    labels index what `head` gives: the vocabulary, or a candidate set.
    teacher: the target's own final hidden states for the same positions. The loss is then
    (1 - soft) CE(label) + soft CE(target's distribution at soft_temperature): the target's forward
    has these for free, and a whole distribution says more than one token.
    """
    batch, rows = labels.shape
    width = min(rows, max(1, chunk // batch))

    def chunks(x: Array) -> Array:
        """[B, R, ...] -> [chunks, B, width, ...]"""
        x = jnp.pad(x, [(0, 0), (0, -rows % width)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, -1, width, *x.shape[2:]).swapaxes(0, 1)

    def joined(values: Any) -> Any:
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :rows], values)

    def one(states: Array, wanted: Array, taught: Array | None) -> tuple[Scores, Callable[[], Array]]:
        logits, pull = jax.vjp(head, states)
        right = jnp.take_along_axis(logits, wanted[..., None], axis=-1)
        largest = jnp.max(logits, axis=-1, keepdims=True)
        shares = jnp.exp(logits - largest)
        total = jnp.sum(shares, axis=-1, keepdims=True)
        normaliser = jnp.log(total) + largest
        cross_entropy = loss = (normaliser - right)[..., 0]
        probs = None
        if taught is not None:
            assert teacher_head is not None
            probs = jax.nn.softmax(teacher_head(taught) / soft_temperature, axis=-1)
            loss = (1 - soft) * loss + soft * (normaliser[..., 0] - jnp.sum(probs * logits, axis=-1))

        def slope() -> Array:
            wish = jax.nn.one_hot(wanted, logits.shape[-1], dtype=logits.dtype)
            if probs is not None:
                wish = (1 - soft) * wish + soft * probs
            return pull(shares / total - wish)[0]

        rank = jnp.sum(logits > right, axis=-1, dtype=jnp.int32)
        return Scores(loss, cross_entropy, rank), slope

    inputs = (chunks(labels), None if teacher is None else chunks(teacher))

    @jax.custom_vjp
    def scores(hidden: Array) -> Scores:
        return joined(lax.map(lambda x: one(*x)[0], (chunks(hidden), *inputs)))

    def forward(hidden: Array) -> tuple[Scores, Array]:
        def both(x: tuple) -> tuple[Scores, Array]:
            made, slope = one(*x)
            return made, slope()

        return joined(lax.map(both, (chunks(hidden), *inputs)))

    def backward(slopes: Array, wanted: Scores) -> tuple[Array]:
        return (slopes * wanted.loss[..., None].astype(slopes.dtype),)

    scores.defvjp(forward, backward)
    return scores(hidden)


def candidate_set(frequency: Float[Array, " V"], labels: Int[Array, " R"], size: int) -> Int[Array, " K"]:
    """K token ids, ascending: every label first of all, then the most frequent tokens.

    Cross-entropy over this set instead of the vocabulary: the frozen head is most of a small draft's
    training time, and almost all of a row's probability is on few tokens. size must hold all labels.
    """
    priority = (frequency / (1 + jnp.max(frequency))).at[labels].set(2.0)
    return jnp.sort(lax.top_k(priority, size)[1].astype(jnp.int32))


def weighted(
    loss: Float[Array, "B A c"], supervised: Bool[Array, "B A c"], gamma: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Numerator and denominator of the decayed loss, apart: both are summed over microbatches and
    devices before they are divided."""
    weights = decay_weights(loss.shape[2] + 1, gamma)[None, None] * supervised.astype(jnp.float32)
    return jnp.sum(loss * weights), jnp.sum(weights)


def dpace_weights(
    cross_entropy: Float[Array, "B A c"], supervised: Bool[Array, "B A c"], smoothing: float = 0.5
) -> Float[Array, "B A c"]:
    """D-PACE: slot j weighs what it can still add to the accepted length, sum_{m >= j} prod_{i <= m} q_i,
    where q is the draft's smoothed probability of the label. Unsupervised slots count as accepted in the
    product and are left out of the sum. Detached: the weights are not differentiated."""
    counts = supervised.astype(jnp.float32)
    q = (1 - smoothing) * jnp.exp(-lax.stop_gradient(cross_entropy)) + smoothing
    reached = jnp.cumprod(jnp.where(supervised, q, 1.0), axis=-1) * counts
    return lax.cumsum(reached, axis=2, reverse=True) * counts


def dpace(
    loss: Float[Array, "B A c"], cross_entropy: Float[Array, "B A c"], supervised: Bool[Array, "B A c"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Numerator and denominator of the D-PACE loss: the mean over sequences of (1/A_b) sum(w CE), A_b the
    sequence's blocks with anything to learn (SpecForge #848; its 0.2.0 divides by the batch size)."""
    sums = jnp.sum(loss * dpace_weights(cross_entropy, supervised), axis=(1, 2))
    blocks = supervised.any(-1).sum(-1).astype(jnp.float32)
    return jnp.sum(sums / jnp.maximum(blocks, 1)), jnp.sum(blocks > 0).astype(jnp.float32)


# --- metrics ------------------------------------------------------------------------------------------


@struct.dataclass
class Metrics:
    """Sums, so that batches and devices add up; `summary` divides.

    loss, weight []: the loss's numerator and denominator. right, seen [C-1]: predicted tokens that were
    the supervised one, per slot; recalled: those where it was among the draft's first RECALL. matched,
    blocks []: leading matches of complete blocks, and how many.
    """

    loss: Array
    weight: Array
    right: Array
    recalled: Array
    seen: Array
    matched: Array
    blocks: Array


def metrics(
    loss: Float[Array, ""],
    weight: Float[Array, ""],
    rank: Int[Array, "B A c"],
    supervised: Bool[Array, "B A c"],
) -> Metrics:
    hit = (rank == 0) & supervised
    complete = supervised.all(-1)
    return Metrics(
        loss=loss,
        weight=weight,
        right=hit.sum((0, 1)).astype(jnp.float32),
        recalled=((rank < RECALL) & supervised).sum((0, 1)).astype(jnp.float32),
        seen=supervised.sum((0, 1)).astype(jnp.float32),
        matched=jnp.sum(jnp.where(complete, leading(hit), 0)).astype(jnp.float32),
        blocks=complete.sum().astype(jnp.float32),
    )


def leading(hit: Bool[Array, "B A c"]) -> Int[Array, "B A"]:
    """How many candidates would be accepted: matches up to the first miss."""
    return jnp.cumprod(hit.astype(jnp.int32), axis=-1).sum(-1)


def summary(total: Metrics) -> dict[str, float | list[float]]:
    """loss, accuracy per slot, and the simulated tau = 1 + mean leading matches of complete blocks.
    Uniform anchors flatter: long accepted stretches hold many of them. See `walk`."""
    numbers = jax.tree.map(np.asarray, total)
    return {
        "loss": float(numbers.loss / max(numbers.weight, 1e-9)),
        "accuracy": [float(x) for x in numbers.right / np.maximum(numbers.seen, 1)],
        f"recall{RECALL}": [float(x) for x in numbers.recalled / np.maximum(numbers.seen, 1)],
        "tau_uniform": float(1 + numbers.matched / max(numbers.blocks, 1)),
    }


def walk(accepted: np.ndarray, start: int, end: int) -> list[int]:
    """The rounds that decoding would take through one supervised text: tokens committed in each.

    accepted [S]: leading matches of the block anchored at each position. start: the first anchor (the
    answer's first token). end: one past the last supervised position. A round at p commits
    accepted[p] + 1 tokens, positions p+1 .. p+1+accepted[p]; what lies beyond `end` does not count.
    """
    rounds = []
    position = start
    while position + 1 < end:
        rounds.append(min(int(accepted[position]) + 1, end - 1 - position))
        position += rounds[-1]
    return rounds
