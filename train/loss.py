"""The objective and its metrics: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's decay for its block sizes


def default_gamma(block_size: int) -> float:
    return GAMMAS.get(block_size, min(7.0, block_size / 2))


def decay_weights(block_size: int, gamma: float) -> Float[Array, " c"]:
    """w_k = exp(-(k-1) / gamma) for slots k = 1 .. C-1: a late slot counts only when all before it
    were accepted, so its errors cost less."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


@struct.dataclass
class Scores:
    """Per predicted row: cross-entropy (nats), and the token that the draft likes best."""

    loss: Array
    best: Array


def score(
    head: Callable[[Array], Array],
    hidden: Float[Array, "R D"],
    labels: Int[Array, " R"],
    chunk: int,
    teacher: Float[Array, "R D"] | None = None,
    teacher_head: Callable[[Array], Array] | None = None,
    soft: float = 0.0,
    soft_temperature: float = 1.0,
) -> Scores:
    """Head and cross-entropy of R rows, `chunk` rows at a time, recomputed in the backward pass: the
    live logits are chunk * V floats whatever A and C are.

    teacher: the target's own final hidden states for the same positions. The loss is then
    (1 - soft) CE(label) + soft CE(target's distribution at soft_temperature): the target's forward
    has these for free, and a whole distribution says more than one token.
    """
    rows = hidden.shape[0]
    chunk = min(chunk, rows)
    padding = -rows % chunk

    def chunks(x: Array) -> Array:
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])

    @jax.checkpoint
    def one(states: Array, wanted: Array, taught: Array | None) -> tuple[Array, Array]:
        logits = head(states)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        loss = normaliser - jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        if taught is not None:
            assert teacher_head is not None
            probs = jax.nn.softmax(lax.stop_gradient(teacher_head(taught)) / soft_temperature, axis=-1)
            loss = (1 - soft) * loss + soft * (normaliser - jnp.sum(probs * logits, axis=-1))
        return loss, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    inputs = (chunks(hidden), chunks(labels), None if teacher is None else chunks(teacher))
    _, (loss, best) = lax.scan(lambda _, x: (None, one(*x)), None, inputs)
    return Scores(loss.reshape(-1)[:rows], best.reshape(-1)[:rows])


def weighted(
    loss: Float[Array, "B A c"], supervised: Bool[Array, "B A c"], gamma: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Numerator and denominator of the decayed loss, apart: both are summed over microbatches and
    devices before they are divided."""
    weights = decay_weights(loss.shape[2] + 1, gamma)[None, None] * supervised.astype(jnp.float32)
    return jnp.sum(loss * weights), jnp.sum(weights)


# --- metrics ------------------------------------------------------------------------------------------


@struct.dataclass
class Metrics:
    """Sums, so that batches and devices add up; `summary` divides.

    loss, weight []: the decayed loss and its denominator. right, seen [C-1]: predicted tokens that were
    the supervised one, per slot. matched, blocks []: leading matches of complete blocks, and how many.
    """

    loss: Array
    weight: Array
    right: Array
    seen: Array
    matched: Array
    blocks: Array


def metrics(
    loss: Float[Array, ""],
    weight: Float[Array, ""],
    best: Int[Array, "B A c"],
    labels: Int[Array, "B A c"],
    supervised: Bool[Array, "B A c"],
) -> Metrics:
    hit = (best == labels) & supervised
    complete = supervised.all(-1)
    return Metrics(
        loss=loss,
        weight=weight,
        right=hit.sum((0, 1)).astype(jnp.float32),
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
