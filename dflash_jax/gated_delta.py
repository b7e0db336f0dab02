"""The gated delta rule over a block of candidates (arXiv 2412.06464), for chains and trees alike.

One head keeps a state S [U, W], a linear map from keys to values. Along a path, with decay e^g, g <= 0:

    S <- e^g S        d = beta (v - S^T k)        S <- S + k d^T        o = S^T q

`recur` is these lines. `delta_block` computes the same for all nodes of a block at once. Write G_i for the
sum of g over ancestors-or-self of node i, and R_ij = exp(G_i - G_j) where j is one of them, else 0:

    (I + A) delta = beta * (V - e^G * (K S))      A_ij = beta_i R_ij (k_i . k_j) for proper ancestors j
    O   = e^G * (Q S) + (R * (Q K^T)) delta
    S_r = e^{G_r} S + sum_j R_rj k_j delta_j^T

Parents precede children, so A is strictly lower triangular: one triangular solve a head in place of T
dependent steps. Verify writes no state: what it must remember to commit any node r is (k, delta, G), the
tape, and `cache.commit` evaluates the last line.

Shapes: Hk key heads of U, Hv = Hk * n value heads of W; value head h reads key head h // n. Everything is
float32, whatever the weights are: a bfloat16 state degenerates within a few tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from dflash_jax.block import Block

# Rows of a chain that one solve covers: its work grows with their square, what chunks repeat (reading and
# writing the state) with their number. 256 rows of Qwen3.5-27B's layer on one CPU core: 62 ms in chunks of
# 16, 53 of 32, 71 of 64, 96 of 128; 177 step by step.
CHUNK = 32

# What a block leaves of one layer: k [B, T, Hk, U] normalised, delta [B, T, Hv, W], decay [B, T, Hv] (G).
Parts = tuple[Array, Array, Array]


def recur(
    q: Float[Array, "B T Hk U"],
    k: Float[Array, "B T Hk U"],
    v: Float[Array, "B T Hv W"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    s: Float[Array, "B Hv U W"],
) -> tuple[Float[Array, "B T Hv W"], Float[Array, "B Hv U W"]]:
    """A chain step by step: outputs, and the state after the last row. The definition that the rest of this
    file is tested against."""
    groups = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, groups, axis=2) for x in normalised(q, k))

    def step(s: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = row
        s = jnp.exp(g)[:, :, None, None] * s
        delta = beta[:, :, None] * (v - _einsum("bhu,bhuw->bhw", k, s))
        s = s + k[..., :, None] * delta[..., None, :]
        return s, _einsum("bhu,bhuw->bhw", q, s)

    rows = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, g, beta))
    s, o = lax.scan(step, s, rows)
    return o.swapaxes(0, 1), s


def delta_block(
    q: Float[Array, "B T Hk U"],
    k: Float[Array, "B T Hk U"],
    v: Float[Array, "B T Hv W"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    s: Float[Array, "B Hv U W"],
    block: Block,
) -> tuple[Float[Array, "B T Hv W"], Parts]:
    """All nodes of a block after the state s: outputs, and the tape to commit any of them from.

    A chain of more than CHUNK rows goes chunk by chunk, each a block of its own on the state that the ones
    before have left. Padding neither decays nor writes.
    """
    with jax.named_scope("gated_delta"):
        q, k = normalised(q, k)
        valid = block.valid[:, :, None]
        g = jnp.where(valid, g.astype(jnp.float32), 0.0)
        beta = jnp.where(valid, beta.astype(jnp.float32), 0.0)
        v = v.astype(jnp.float32)
        if block.chain and block.size > CHUNK:
            o, delta, decay = _in_chunks(q, k, v, g, beta, s)
        else:
            o, delta, decay = _solve(q, k, v, g, beta, s, block.ancestors)
        return o, (k, delta, decay)


def states_of(parts: Parts, s: Float[Array, "B Hv U W"], block: Block) -> Float[Array, "B T Hv U W"]:
    """The state after every node: what a tape stands for, T times the memory of s."""
    k, delta, decay = parts
    groups = delta.shape[2] // k.shape[2]
    kept = _ratios(decay, block.ancestors)
    written = jnp.repeat(k, groups, axis=2)[..., :, None] * delta[..., None, :]
    return jnp.exp(decay)[..., None, None] * s[:, None] + _einsum("bhij,bjhuw->bihuw", kept, written)


def convolve(
    x: Float[Array, "B T ch"],
    conv: Float[Array, "B w ch"],
    weight: Float[Array, "ch width"],
    block: Block,
) -> Float[Array, "B T ch"]:
    """Depthwise causal convolution along root paths, float32: node i reads itself (the last column of
    weight) and its width - 1 nearest ancestors; above the root the path goes on through `conv`, the
    inputs before the block, newest last."""
    before, width = conv.shape[1], weight.shape[1]
    inputs = jnp.concatenate([conv.astype(x.dtype), x], axis=1).astype(jnp.float32)
    # Where the step up from each row of `inputs` leads; the root's parent, -1, is the newest of conv.
    older = jnp.broadcast_to(jnp.arange(before) - 1, (x.shape[0], before))
    up = jnp.concatenate([older, block.parents + before], axis=1)
    at = jnp.broadcast_to(jnp.arange(block.size) + before, block.parents.shape)
    weight = weight.astype(jnp.float32)
    total = jnp.zeros(x.shape, jnp.float32)
    for column in reversed(range(width)):
        total = total + weight[:, column][None, None] * jnp.take_along_axis(inputs, at[:, :, None], axis=1)
        at = jnp.take_along_axis(up, at, axis=1)
    return total


def normalised(
    q: Float[Array, "B T Hk U"], k: Float[Array, "B T Hk U"]
) -> tuple[Float[Array, "B T Hk U"], Float[Array, "B T Hk U"]]:
    """Both of length 1, and queries divided by sqrt(U). The 1e-6 is part of the model: short vectors are
    shortened by it."""

    def unit(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def _solve(
    q: Array, k: Array, v: Array, g: Array, beta: Array, s: Array, ancestors: Bool[Array, "B T T"]
) -> tuple[Array, Array, Array]:
    """(o, delta, decay) of a block. Heads are split as [Hk, n] inside, so that what the value heads of one
    key head share is computed once."""
    batch, rows, key_heads, _ = k.shape
    v, g, beta = (x.reshape(batch, rows, key_heads, -1, *x.shape[3:]) for x in (v, g, beta))
    decay = _einsum("bij,bjhn->bihn", ancestors.astype(jnp.float32), g)
    ratios = _ratios(decay.reshape(batch, rows, -1), ancestors).reshape(batch, *v.shape[2:4], rows, rows)
    # Queries and keys meet the same two matrices, and the state is the largest thing to read here.
    both = jnp.concatenate([q, k], axis=1)
    q_s, k_s = jnp.split(
        _einsum("bihu,bhnuw->bhniw", both, s.reshape(batch, *v.shape[2:4], *s.shape[2:])), 2, axis=3
    )
    q_k, k_k = jnp.split(_einsum("bihu,bjhu->bhij", both, k)[:, :, None], 2, axis=3)

    v, decay, beta = (jnp.moveaxis(x, 1, 3) for x in (v, decay, beta))
    through = jnp.exp(decay)[..., None]
    # The solve takes the diagonal for 1 and does not look at it.
    delta = lax.linalg.triangular_solve(
        beta[..., None] * ratios * k_k,
        beta[..., None] * (v - through * k_s),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    o = through * q_s + _einsum("bhnij,bhnjw->bhniw", ratios * q_k, delta)
    o, delta, decay = (jnp.moveaxis(x, 3, 1) for x in (o, delta, decay))
    o, delta, decay = (x.reshape(batch, rows, -1, *x.shape[4:]) for x in (o, delta, decay))
    return o, delta, decay


def _ratios(decay: Float[Array, "B T Hv"], ancestors: Bool[Array, "B T T"]) -> Float[Array, "B Hv T T"]:
    """R: what is left at node i of what was written at node j. The exponent is masked before exp: other
    pairs have large positive ones, which overflow, and whose gradients are NaN through a later mask."""
    by_head = decay.swapaxes(1, 2)
    mask = ancestors[:, None]
    gap = jnp.where(mask, by_head[..., :, None] - by_head[..., None, :], 0.0)
    return jnp.where(mask, jnp.exp(gap), 0.0)


def _in_chunks(q: Array, k: Array, v: Array, g: Array, beta: Array, s: Array) -> tuple[Array, Array, Array]:
    """(o, delta, decay) of a long chain; decay counts from the start of the whole chain."""
    batch, rows = k.shape[:2]
    count = -(-rows // CHUNK)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, count * CHUNK - rows if axis == 1 else 0) for axis in range(x.ndim)])
        return x.reshape(batch, count, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    ancestors = jnp.broadcast_to(jnp.tri(CHUNK, dtype=bool), (batch, CHUNK, CHUNK))

    def chunk(carry: tuple[Array, Array], rows: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple]:
        s, before = carry
        q, k, v, g, beta = rows
        o, delta, decay = _solve(q, k, v, g, beta, s, ancestors)
        end = decay[:, -1]
        kept = jnp.exp(end[:, None] - decay)[..., None] * delta
        k = jnp.repeat(k, kept.shape[2] // k.shape[2], axis=2)
        s = jnp.exp(end)[..., None, None] * s + _einsum("bjhu,bjhw->bhuw", k, kept)
        return (s, before + end), (o, delta, decay + before[:, None])

    _, parts = lax.scan(chunk, (s, jnp.zeros_like(g[:, 0])), tuple(map(split, (q, k, v, g, beta))))
    o, delta, decay = (x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :rows] for x in parts)
    return o, delta, decay


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
