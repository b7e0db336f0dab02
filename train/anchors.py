"""Which blocks a training step looks at (paper 3.4).

A block begins at an anchor p: token p clean, then C-1 masks; slot k is position p + k and predicts
its token. Anchors are drawn anew each time a sequence is seen, so that over epochs every position is
an anchor: in the paper's ablation this gives tau 5.64 where fixed chunks give 4.94 (Math500).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Blocks:
    """A blocks of C slots per sequence.

    anchors     [B, A] i32      position of slot 0, ascending; 0 where not kept
    keep        [B, A] bool     False for the padding of sequences with fewer than A anchors
    inputs      [B, A, C] i32   the anchor's token, then masks
    labels      [B, A, C-1] i32 tokens of positions p+1 .. p+C-1 (filler where not supervised)
    supervised  [B, A, C-1] bool
    """

    anchors: Array
    keep: Array
    inputs: Array
    labels: Array
    supervised: Array

    @property
    def size(self) -> int:
        return self.inputs.shape[2]


def eligible(supervised: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Positions p where p and p + 1 are both supervised: a block there has something to learn, and
    decoding really begins blocks at such positions (the first anchor is the answer's first token)."""
    return supervised & jnp.pad(supervised[:, 1:], ((0, 0), (0, 1)))


def sample_anchors(
    key: jax.Array, possible: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` of the possible positions per sequence, uniform without replacement, ascending, and which
    of them are real: a sequence with fewer has all of its own first, then padding (position 0)."""
    scores = jnp.where(possible, jax.random.uniform(key, possible.shape), -1.0)
    best, positions = lax.top_k(scores, min(count, possible.shape[1]))
    length = possible.shape[1]
    positions = jnp.sort(jnp.where(best >= 0, positions, length), axis=1).astype(jnp.int32)
    positions = jnp.pad(positions, ((0, 0), (0, max(0, count - possible.shape[1]))), constant_values=length)
    keep = positions < length
    return jnp.where(keep, positions, 0), keep


def chunk_starts(supervised: Bool[Array, "B S"], size: int) -> Bool[Array, "B S"]:
    """The ablation's anchors: every `size`-th supervised position, the same in every epoch."""
    count = jnp.cumsum(supervised.astype(jnp.int32), axis=1) - 1
    return supervised & (count % size == 0)


def layout(
    tokens: Int[Array, "B S"],
    supervised: Bool[Array, "B S"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    size: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks of these anchors. A slot counts where its own position is supervised and inside the
    sequence: a gap in the supervision does not cut the rest of the block."""
    batch, count = anchors.shape
    length = tokens.shape[1]
    positions = anchors[:, :, None] + jnp.arange(1, size, dtype=jnp.int32)[None, None]
    inside = (positions < length) & keep[:, :, None]
    index = jnp.minimum(positions, length - 1).reshape(batch, -1)

    def at(values: Array) -> Array:
        return jnp.take_along_axis(values, index, axis=1).reshape(positions.shape)

    first = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
    masks = jnp.full((batch, count, size - 1), mask_token_id, tokens.dtype)
    return Blocks(
        anchors=anchors,
        keep=keep,
        inputs=jnp.concatenate([first, masks], axis=2),
        labels=at(tokens),
        supervised=inside & at(supervised),
    )
