"""Choosing tokens: filters, keys, and the two acceptance rules.

*Matching* (default): the target's token at a node is drawn from its filtered distribution with a
key that depends only on the row's seed and the token's position, and a candidate is accepted when
it equals that draw. The probability that an argmax candidate x is accepted is p(x), what rejection
would give it, and since a draw does not depend on how its position was reached, speculative output
equals autoregressive output of the same seed, token for token.

*Rejection* (`draft_probs`, chains only; arXiv 2211.17192): candidates drawn from the draft's q are
accepted with probability min(1, p/q), else the residual max(p - q, 0) is drawn from. Exact in
distribution, not in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.block import Block
from dflash_jax.config import ConfigError

# Independent streams of one seed: sharing one breaks exactness of rejection.
TARGET, _PROPOSAL, _TEST, _RESIDUAL = range(4)


@struct.dataclass
class Sampling:
    """temperature 0 is greedy. Filters apply in this order: temperature, top_k, top_p.

    Only what changes the program is static, so another temperature does not compile again. temperature
    and top_p are scalars, or [B, 1, 1] where every row has its own.
    """

    temperature: Array
    top_p: Array
    top_k: int = struct.field(pytree_node=False, default=0)
    greedy: bool = struct.field(pytree_node=False, default=True)
    nucleus: bool = struct.field(pytree_node=False, default=False)


def sampling(temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    """top_p 1 and top_k 0 switch these filters off. Raises ConfigError outside the ranges."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}: it must be 0 (greedy) or positive")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}: it must be in (0, 1]; 1 switches it off")
    if top_k < 0:
        raise ConfigError(f"top_k is {top_k}: it must be 0 (off) or positive")
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=jnp.asarray(top_p, jnp.float32),
        top_k=top_k,
        greedy=temperature == 0,
        nucleus=top_p < 1,
    )


def filtered(logits: Float[Array, "B T V"], how: Sampling) -> Float[Array, "B T V"]:
    """Logits over temperature, -inf where a filter removes a token; ties at a threshold stay.

    Both filters keep the values at or above a threshold, found by bisection: 32 passes over V cost less
    than a sort (with top-k 20 and top-p 0.9, 8 rows of 49,152 take 12 ms on 2 cores, with `lax.top_k` 141).
    """
    scaled = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        keep = _at_least(scaled, lambda kept: kept.sum(-1, dtype=jnp.int32) >= how.top_k)
        scaled = jnp.where(keep, scaled, -jnp.inf)
    if how.nucleus:
        probs = jax.nn.softmax(scaled, axis=-1)
        mass = partial(jnp.sum, axis=-1, keepdims=True)  # top_p may be [B, 1, 1]
        keep = _at_least(probs, lambda kept: (mass(jnp.where(kept, probs, 0.0)) >= how.top_p)[..., 0])
        scaled = jnp.where(keep, scaled, -jnp.inf)
    return scaled


def _at_least(values: Float[Array, "B T V"], enough: Callable[[Array], Array]) -> Bool[Array, "B T V"]:
    """values >= t for the largest t at which `enough` of them remain ([B, T, V] mask -> [B, T] bool).

    Bisects over the bit patterns of the floats, mapped to integers of the same order, so it is exact.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def narrow(_, bounds):
        low, high = bounds  # low always keeps enough, high never does
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum may overflow
        ok = enough(ordered >= middle[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    extreme = jnp.iinfo(jnp.int32)
    low = jnp.full(values.shape[:-1], extreme.min, jnp.int32)
    high = jnp.full(values.shape[:-1], extreme.max, jnp.int32)
    return ordered >= lax.fori_loop(0, 32, narrow, (low, high))[0][..., None]


def uniforms(seeds: Int[Array, " B"], positions: Int[Array, "B T"], stream: int) -> Float[Array, "B T"]:
    """One number in [0, 1) for each position of each row, whatever led there."""
    base = jax.random.fold_in(jax.random.key(0), stream)

    def draw(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(base, seed), position))

    return jax.vmap(jax.vmap(draw, (None, 0)))(seeds, positions)


def most_likely(x: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """Argmax (the first maximum), in two passes that vectorise: half the time of jnp.argmax on a CPU."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)[None, None]
    at_top = x == x.max(-1, keepdims=True)
    return jnp.where(at_top, index, x.shape[-1] - 1).min(-1)


def _draw(weights: Float[Array, "B T V"], uniform: Float[Array, "B T"]) -> Int[Array, "B T"]:
    """The token in whose share of the total weight `uniform` falls: one random number a draw, where the
    Gumbel maximum needs V. Found in two steps, first among sums over groups of tokens, then in a group,
    because a running sum over V is slow and inexact."""
    vocab = weights.shape[-1]
    width = 1 << math.isqrt(max(vocab - 1, 1)).bit_length()
    padded = jnp.pad(weights, ((0, 0), (0, 0), (0, -vocab % width)))
    groups = padded.reshape(*weights.shape[:2], -1, width)
    sums = groups.sum(-1)
    group, rest = _falls_into(sums, uniform * sums.sum(-1))
    inside, _ = _falls_into(jnp.take_along_axis(groups, group[..., None, None], axis=2)[..., 0, :], rest)
    return group * width + inside


def _falls_into(
    shares: Float[Array, "B T n"], point: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The share that holds `point` on their concatenation, and the point's offset inside it. Never a
    share of zero, also where rounding puts the point at or beyond the end."""
    ends = jnp.cumsum(shares, axis=-1)
    beyond = (ends > point[..., None]) & (shares > 0)
    last = jnp.where(shares > 0, jnp.arange(shares.shape[-1])[None, None], 0).max(-1)
    found = jnp.where(beyond.any(-1), jnp.argmax(beyond, axis=-1), last).astype(jnp.int32)
    start = jnp.take_along_axis(ends - shares, found[..., None], axis=-1)[..., 0]
    return found, point - start


def choose(
    logits: Float[Array, "B T V"], how: Sampling, seeds: Int[Array, " B"], positions: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The target's token after each node. positions: where the chosen token will stand."""
    if how.greedy:
        return most_likely(logits)
    return _draw(jax.nn.softmax(filtered(logits, how), axis=-1), uniforms(seeds, positions, TARGET))


def propose_samples(
    logits: Float[Array, "B c V"], how: Sampling, seeds: Int[Array, " B"], positions: Int[Array, "B c"]
) -> tuple[Int[Array, "B c"], Float[Array, "B c V"]]:
    """Candidates drawn from the draft's filtered distribution q, and q."""
    q = jax.nn.softmax(filtered(logits, how), axis=-1)
    return _draw(q, uniforms(seeds, positions, _PROPOSAL)), q


@struct.dataclass
class Acceptance:
    """path    [B, T] i32  nodes of the accepted path, root first; entries from `count` on are filler
    count   [B] i32     nodes on the path = accepted candidates + 1 = tokens that the round yields
    tokens  [B, T] i32  those tokens in order: accepted candidates, then the target's own choice
    choices [B, T] i32  the target's choice after each node (of the walk only, under rejection)
    """

    path: Array
    count: Array
    tokens: Array
    choices: Array


def accept(
    block: Block,
    logits: Float[Array, "B T V"],
    how: Sampling,
    seeds: Int[Array, " B"],
    positions: Int[Array, "B T"],
    draft_probs: Float[Array, "B c V"] | None = None,
) -> Acceptance:
    """Walk from the root while the target agrees with a child.

    positions[b, i]: where a token chosen after node i would stand. draft_probs: the q that the
    candidates of a chain were drawn from; switches to rejection.
    """
    with jax.named_scope("accept"):
        if draft_probs is None:
            choices = choose(logits, how, seeds, positions)
            return _follow(block, choices)
        return _reject(block, filtered(logits, how), draft_probs, seeds, positions)


def _follow(block: Block, choices: Int[Array, "B T"]) -> Acceptance:
    """A node is on the path iff it and all its ancestors are what the target chose after their
    parents. Siblings carry different tokens, so this is one path, and since parents precede
    children its nodes in index order are its nodes in path order."""
    wanted = jnp.take_along_axis(choices, jnp.maximum(block.parents, 0), axis=1)
    agreed = ((block.tokens == wanted) | (block.parents < 0)) & block.valid
    on_path = ~(block.ancestors & ~agreed[:, None, :]).any(-1)
    return _acceptance(block, on_path, choices)


def _acceptance(block: Block, on_path: Bool[Array, "B T"], choices: Int[Array, "B T"]) -> Acceptance:
    index = jnp.arange(block.size, dtype=jnp.int32)[None]
    path = jnp.sort(jnp.where(on_path, index, block.size), axis=1)
    path = jnp.minimum(path, block.size - 1).astype(jnp.int32)
    count = on_path.sum(-1, dtype=jnp.int32)
    # After node path[i] comes the candidate path[i + 1] if there is one, else the target's choice.
    candidates = jnp.take_along_axis(block.tokens, jnp.roll(path, -1, axis=1), axis=1)
    own = jnp.take_along_axis(choices, path, axis=1)
    return Acceptance(path, count, jnp.where(index < count[:, None] - 1, candidates, own), choices)


def _reject(
    block: Block,
    log_weights: Float[Array, "B T V"],
    q: Float[Array, "B c V"],
    seeds: Int[Array, " B"],
    positions: Int[Array, "B T"],
) -> Acceptance:
    p = jax.nn.softmax(log_weights, axis=-1)
    candidates = block.tokens[:, 1:, None]
    p_x = jnp.take_along_axis(p[:, :-1], candidates, axis=2)[..., 0]
    q_x = jnp.take_along_axis(q, candidates, axis=2)[..., 0]
    uniform = uniforms(seeds, positions[:, :-1], _TEST)
    passed = (uniform * q_x < p_x) & block.valid[:, 1:]  # padding has q 0 and would pass
    accepted = jnp.cumprod(passed.astype(jnp.int32), axis=1)
    on_path = jnp.concatenate([jnp.ones_like(accepted[:, :1]), accepted], axis=1) > 0
    # Row i's residual is what is left of p_i once q_i had its chance; the last row has no candidate.
    residual = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0.0)
    weights = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p)
    own = _draw(weights, uniforms(seeds, positions, _RESIDUAL))
    return _acceptance(block, on_path, own)


def log_probability(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Of the given tokens under the unfiltered distribution."""
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
