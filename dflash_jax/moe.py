"""Routed experts: an MLP of many parts (experts), of which each token uses a few.

Three ways to run them, equal in what they compute, because none is good everywhere. A token's experts
differ from its neighbour's, so a forward of R tokens uses up to R * k of the E experts, k each:

gathered  copies the weights of every (token, expert) pair: moves 3 R k experts (read, write, read)
ragged    lax.ragged_dot over pairs sorted by expert
tiled     sorted pairs cut into tiles of one expert each, tile after tile: moves the experts in use, once a
          tile

Measured on one CPU core that had other work too (best of 15 or 4), float32, D 256, I 128, E 64, k 8 (25 MB
of experts), ms:

    tokens      experts in use   gathered   ragged   tiled
    1                        8        0.5       57     0.3
    8                       44         15      110      12
    16                      58        100      154       9
    256                     64       1552     1400      38
    512                     64       3128     1704      48

So the CPU takes tiles: XLA expands its ragged_dot to all E experts times all pairs. On a GPU each step of a
loop is half a dozen launches and 128 tiles in 48 layers are longer than the weights take to read, so it
takes the other two. ragged_dot reads each expert at most once, but in XLA's default lowering all E,
used or not, and multiplies every pair with each; only grouped kernels make its cost follow the experts in
use (XLA_FLAGS=--xla_gpu_experimental_use_ragged_dot_grouped_gemm=true, or JAX's own,
JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING=1). A decoder's single token uses 8 of 128 or 256 experts,
for which copies are cheaper than that: pairs are gathered while 3 R k <= E. (Reasoned from bytes and
launches, not measured.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.numerics import contract, precision

# Rows of a tile, or more where an expert has more on average: with fewer, a CPU's matmul takes hardly less
# (an expert of D 512, I 192: 0.19 ms for 4 rows, 0.21 for 8, 0.23 for 16, 0.45 for 64).
_TILE = 16


@struct.dataclass
class Routing:
    """experts [B, T, k] i32 that each token uses, heaviest first; weights [B, T, k] float32 of their outputs."""

    experts: Array
    weights: Array


def route(logits: Float[Array, "B T E"], per_token: int, normalise: bool) -> Routing:
    """The softmax over all experts, of which the heaviest `per_token` count (Qwen3-MoE, Qwen3.5-MoE).

    normalise: their weights are divided by their sum, so that they sum to 1.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), per_token)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights)


def run_experts(
    x: Float[Array, "B T D"], to: Routing, gate_up: Float[Array, "E F D"], down: Float[Array, "E D I"]
) -> Float[Array, "B T D"]:
    """Each token's sum of weight * SwiGLU of its experts, in the dtype of x, summed in float32.

    gate_up, down: fused as transformers 5 has them, F = 2 I with the gate first.
    """
    size = x.shape[-1]
    few = 3 * to.experts.size <= len(gate_up)
    y = lax.platform_dependent(
        x.reshape(-1, size),
        to.experts.reshape(-1, to.experts.shape[-1]),
        to.weights.reshape(-1, to.weights.shape[-1]),
        gate_up,
        down,
        cpu=tiled,
        default=gathered if few else ragged,
    )
    return y.astype(x.dtype).reshape(x.shape)


def gathered(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate_up: Float[Array, "E F D"],
    down: Float[Array, "E D I"],
) -> Float[Array, "R D"]:
    """One copy of an expert's weights for each of its tokens."""
    h = _swiglu(contract("rkfd,rd->rkf", gate_up[experts], x)).astype(x.dtype)
    y = contract("rkdi,rki->rkd", down[experts], h)
    return (y * weights[:, :, None]).sum(1)


def ragged(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate_up: Float[Array, "E F D"],
    down: Float[Array, "E D I"],
) -> Float[Array, "R D"]:
    """lax.ragged_dot: pairs sorted by expert, a group of rows for each."""
    order, sizes = _sort(experts, len(gate_up))
    rows = order // experts.shape[1]

    def multiply(a: Array, b: Array) -> Array:
        return lax.ragged_dot(a, b.swapaxes(1, 2), sizes, precision(a), preferred_element_type=jnp.float32)

    h = _swiglu(multiply(x[rows], gate_up)).astype(x.dtype)
    y = multiply(h, down) * weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[rows].add(y)


def tiled(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate_up: Float[Array, "E F D"],
    down: Float[Array, "E D I"],
) -> Float[Array, "R D"]:
    """Pairs sorted by expert, cut into tiles of one expert each; tiles are as many as the worst routing needs,
    and those left over are skipped."""
    (tokens, per_token), count = experts.shape, len(gate_up)
    size = min(tokens, max(_TILE, experts.size // count))
    order, sizes = _sort(experts, count)
    start = jnp.cumsum(sizes) - sizes  # of each expert's pairs in `order`
    last = jnp.cumsum((sizes + size - 1) // size)  # tiles of all experts up to this one

    tile = jnp.arange(min(experts.size, count + experts.size // size))
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), count - 1)
    used = tile < last[-1]
    # tile j of an expert holds its pairs j * size, j * size + 1, ...
    before = jnp.where(expert > 0, last[expert - 1], 0)
    nth = ((tile - before) * size)[:, None] + jnp.arange(size)[None]
    filled = used[:, None] & (nth < sizes[expert][:, None])
    pair = order[jnp.where(filled, start[expert][:, None] + nth, 0)]
    weight = jnp.where(filled, weights.reshape(-1)[pair], 0.0)

    def add(total: Array, expert: Array, rows: Array, weight: Array) -> Array:
        # weights are the left operand, as in layers.Linear
        h = _swiglu(contract("fd,rd->fr", gate_up[expert], x[rows]).T).astype(x.dtype)
        y = contract("di,ri->dr", down[expert], h).T
        return total.at[rows].add(y * weight[:, None])

    def step(total: Array, tile: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        used, *rest = tile
        return lax.cond(used, add, lambda total, *_: total, total, *rest), None

    # a scan, not a loop of `last[-1]` steps: the same time here, and it has a gradient
    tiles = (used, expert, pair // per_token, weight)
    total, _ = lax.scan(step, jnp.zeros(x.shape, jnp.float32), tiles)
    return total


def _sort(experts: Int[Array, "R k"], count: int) -> tuple[Int[Array, " A"], Int[Array, " E"]]:
    """(token, expert) pairs in the order of their experts, and how many each expert has."""
    flat = experts.reshape(-1)
    return jnp.argsort(flat), jnp.bincount(flat, length=count)


def _swiglu(h: Float[Array, "*rows F"]) -> Float[Array, "*rows I"]:
    gate, up = jnp.split(h, 2, axis=-1)
    return jax.nn.silu(gate) * up
