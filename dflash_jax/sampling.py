"""Choosing tokens: filters, keys, and the two acceptance rules (ALGORITHMS 6).

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

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.block import Block
from dflash_jax.config import ConfigError

# Independent streams of one seed: sharing one breaks exactness of rejection.
_TARGET, _PROPOSAL, _TEST, _RESIDUAL = range(4)


@struct.dataclass
class Sampling:
    """temperature 0 is greedy. Filters apply in this order: temperature, top_k, top_p.

    Only what changes the program is static, so another temperature does not compile again.
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
    """Logits over temperature, -inf where a filter removes a token; ties at a threshold stay."""
    scaled = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        smallest = lax.top_k(scaled, how.top_k)[0][..., -1:]
        scaled = jnp.where(scaled >= smallest, scaled, -jnp.inf)
    if how.nucleus:
        probs = jax.nn.softmax(scaled, axis=-1)
        scaled = jnp.where(probs >= _nucleus_threshold(probs, how.top_p), scaled, -jnp.inf)
    return scaled


def _nucleus_threshold(probs: Float[Array, "B T V"], mass: Float[Array, ""]) -> Float[Array, "B T 1"]:
    """The largest t with sum(p where p >= t) >= mass: keeping p >= t is the nucleus.

    Non-negative floats order like their bit patterns, so bisection over 31 bits is exact; it costs
    31 passes over V where a sort costs far more.
    """

    def narrow(_, bounds):
        low, high = bounds  # low always keeps enough mass, high never does
        middle = low + (high - low) // 2
        kept = jnp.sum(jnp.where(probs >= lax.bitcast_convert_type(middle, jnp.float32), probs, 0.0), -1)
        enough = kept[..., None] >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros((*probs.shape[:-1], 1), jnp.int32)
    above_one = jnp.asarray(1.5, jnp.float32)
    high = jnp.full_like(low, lax.bitcast_convert_type(above_one, jnp.int32))
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, narrow, (low, high))[0], jnp.float32)


def _keys(seeds: Int[Array, " B"], positions: Int[Array, "B T"], stream: int) -> Array:
    base = jax.random.fold_in(jax.random.key(0), stream)

    def key(seed: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, seed), position)

    return jax.vmap(jax.vmap(key, (None, 0)))(seeds, positions)


def _draw(log_weights: Float[Array, "B T V"], keys: Array) -> Int[Array, "B T"]:
    """One categorical draw per row, by the Gumbel maximum."""
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, log_weights.shape[-1:])))(keys)
    return jnp.argmax(log_weights + noise, axis=-1).astype(jnp.int32)


def choose(
    logits: Float[Array, "B T V"], how: Sampling, seeds: Int[Array, " B"], positions: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The target's token after each node. positions: where the chosen token will stand."""
    if how.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return _draw(filtered(logits, how), _keys(seeds, positions, _TARGET))


def propose_samples(
    logits: Float[Array, "B c V"], how: Sampling, seeds: Int[Array, " B"], positions: Int[Array, "B c"]
) -> tuple[Int[Array, "B c"], Float[Array, "B c V"]]:
    """Candidates drawn from the draft's filtered distribution q, and q."""
    weights = filtered(logits, how)
    return _draw(weights, _keys(seeds, positions, _PROPOSAL)), jax.nn.softmax(weights, axis=-1)


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
    agreed = ((block.tokens == wanted) & block.valid) | (block.parents < 0)
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
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(_keys(seeds, positions[:, :-1], _TEST))
    accepted = jnp.cumprod((uniform * q_x < p_x).astype(jnp.int32), axis=1)
    on_path = jnp.concatenate([jnp.ones_like(accepted[:, :1]), accepted], axis=1) > 0
    # Row i's residual is what is left of p_i once q_i had its chance; the last row has no candidate.
    residual = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0.0)
    weights = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p)
    own = _draw(jnp.log(weights), _keys(seeds, positions, _RESIDUAL))
    return _acceptance(block, on_path, own)
