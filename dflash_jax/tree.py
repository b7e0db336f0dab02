"""Candidate trees from one pass of the draft (DDTree, arXiv 2604.12989).

The draft gives a distribution for every depth, each independent of what was picked before. A node (a prefix
of candidates) weighs the sum of its tokens' log-probabilities; the tree is the M heaviest prefixes, which is
prefix-closed because a child never outweighs its parent, and maximises the expected accepted length under
the draft's marginals. DDTree pops them from a heap; here a beam finds the same set without a data-dependent
loop: the M heaviest prefixes of a depth extend M heaviest prefixes of the depth before.

Nodes come heaviest first, parents before children, so the first n nodes are the tree of budget n: one tree
serves every verify size. A chain is the tree of the best candidate of each depth.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.config import ConfigError

LARGEST = 1024  # candidates; published trees have up to 512


@dataclass(frozen=True)
class TreeShape:
    """budget: candidates, the anchor excluded. chain_seed: the best chain goes in first, whatever it weighs
    (better when the target is quantised). temperature: divides the draft's logits before ranking."""

    budget: int
    chain_seed: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ConfigError(f"tree budget is {self.budget}: a tree has at least one candidate")
        if self.budget > LARGEST:
            raise ConfigError(
                f"tree budget is {self.budget}: at most {LARGEST}, as memory grows with its square"
            )
        if not self.temperature > 0:
            raise ConfigError(f"tree temperature is {self.temperature}: it must be positive")

    def check_block(self, size: int) -> None:
        if self.chain_seed and self.budget < size - 1:
            raise ConfigError(
                f"tree budget {self.budget} has no room for the chain of {size - 1} candidates: raise it, lower the "
                "block size or leave chain_seed out"
            )


@struct.dataclass
class Candidates:
    """block: the anchor and its candidates. weight [B, T]: log-probability of each node's path under the draft's
    marginals (0 for the anchor, -inf for padding)."""

    block: Block
    weight: Array


def anchor_alone(anchor: Int[Array, " B"], chain: bool = True) -> Candidates:
    """No candidates. chain: what else would be drafted (see Block.chain)."""
    block = dataclasses.replace(chain_block(anchor[:, None]), chain=chain)
    return Candidates(block, jnp.zeros((anchor.shape[0], 1), jnp.float32))


def draft_chain(
    anchor: Int[Array, " B"], logits: Float[Array, "B c V"], tokens: Int[Array, "B c"]
) -> Candidates:
    """One candidate for every depth."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=2)[..., 0]
    weight = jnp.cumsum(chosen - jax.nn.logsumexp(logits, axis=-1), axis=1)
    block = chain_block(jnp.concatenate([anchor[:, None], tokens], axis=1))
    return Candidates(block, jnp.pad(weight, ((0, 0), (1, 0))))


def draft_tree(anchor: Int[Array, " B"], logits: Float[Array, "B c V"], shape: TreeShape) -> Candidates:
    """The tree of `shape.budget` candidates, as a block of budget + 1 nodes.

    Order: the seeded chain, if any; then by weight, depth, parent, rank. Rows have their own trees; where a
    vocabulary has fewer prefixes than the budget, the rest is padding.
    """
    with jax.named_scope("tree"):
        top, token = top_k(logits / shape.temperature, min(shape.budget, logits.shape[-1]))
        normal = jax.nn.logsumexp(logits / shape.temperature, axis=-1, keepdims=True)
        beam = _beam(top - normal, shape.budget)
        return _heaviest(anchor, token, beam, shape)


@struct.dataclass
class _Beam:
    """The heaviest prefixes of each depth, [B, depths, budget], heaviest first: their weight, the beam position
    of their parent one depth above, the rank of their last token. weight -inf: there is none."""

    weight: Array
    parent: Array
    rank: Array


def _beam(logp: Float[Array, "B c K"], budget: int) -> _Beam:
    # Prefix b of a sorted beam with its r-th best token has (b + 1)(r + 1) - 1 others before it: those that are
    # no worse in both. So only about M ln M pairs can be among the first M.
    pairs = np.array(
        [(b, r) for b in range(budget) for r in range(logp.shape[-1]) if (b + 1) * (r + 1) <= budget],
        np.int32,
    )
    above, rank = jnp.asarray(pairs[:, 0]), jnp.asarray(pairs[:, 1])

    def grow(weight: Array, tokens: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        extended = jnp.take(weight, above, axis=1) + jnp.take(tokens, rank, axis=1)
        order = jnp.argsort(-extended, axis=1, stable=True)[:, :budget]
        weight = jnp.take_along_axis(extended, order, axis=1)
        return weight, (weight, jnp.take(above, order), jnp.take(rank, order))

    root = jnp.where(jnp.arange(budget) == 0, 0.0, -jnp.inf)
    start = jnp.broadcast_to(root, (logp.shape[0], budget)).astype(jnp.float32)
    _, levels = lax.scan(grow, start, logp.swapaxes(0, 1))
    return _Beam(*(level.swapaxes(0, 1) for level in levels))


def _heaviest(anchor: Array, token: Int[Array, "B c K"], beam: _Beam, shape: TreeShape) -> Candidates:
    """The first `budget` of all beams, numbered in their order; node 0 is the anchor."""
    batch, depths, budget = beam.weight.shape
    weight = beam.weight.reshape(batch, -1)
    key = weight
    if shape.chain_seed:  # the best prefix of every depth is the first of its beam
        key = jnp.where(jnp.arange(depths * budget) % budget == 0, jnp.inf, key)
    # Stable, and depth-major before: equal weights stay in the order of depth, parent, rank.
    order = jnp.argsort(-key, axis=1, stable=True)
    number = jnp.argsort(order, axis=1) + 1
    chosen = order[:, :budget]
    depth, parent = chosen // budget, jnp.take_along_axis(beam.parent.reshape(batch, -1), chosen, axis=1)
    rank = jnp.take_along_axis(beam.rank.reshape(batch, -1), chosen, axis=1)
    above = jnp.take_along_axis(number, jnp.maximum((depth - 1) * budget + parent, 0), axis=1)
    weight = jnp.take_along_axis(weight, chosen, axis=1)
    valid = weight > -jnp.inf
    flat = (depth * token.shape[-1] + rank).astype(jnp.int32)
    tokens = jnp.take_along_axis(token.reshape(batch, -1), flat, axis=1)
    # padding hangs from the anchor: parents precede children there too
    parents = jnp.where(valid & (depth > 0), above, 0).astype(jnp.int32)

    def below(x: Array, root: Array) -> Array:
        return jnp.concatenate([root[:, None], x], axis=1)

    zeros = jnp.zeros(batch, jnp.int32)
    block = tree_block(
        below(jnp.where(valid, tokens, 0), anchor), below(parents, zeros - 1), below(valid, zeros == 0)
    )
    return Candidates(block, below(weight, zeros.astype(jnp.float32)))


def first_nodes(candidates: Candidates, size: int) -> Candidates:
    """The chain or tree of the first `size` nodes, the anchor included."""
    b = candidates.block
    block = Block(
        b.tokens[:, :size], b.parents[:, :size], b.depth[:, :size], b.ancestors[:, :size, :size],
        b.valid[:, :size], b.chain,
    )  # fmt: skip
    return Candidates(block, candidates.weight[:, :size])


def pad_candidates(candidates: Candidates, size: int) -> Candidates:
    """As many nodes, of which the new ones are padding: branches of different sizes return one shape."""
    b = candidates.block
    rows = size - b.size
    if rows <= 0:
        return candidates
    parents = jnp.broadcast_to(jnp.arange(b.size, size, dtype=jnp.int32) - 1, (b.tokens.shape[0], rows))
    square = jnp.pad(b.ancestors, ((0, 0), (0, rows), (0, rows))) | jnp.eye(size, dtype=bool)[None]
    block = Block(
        pad_rows(b.tokens, rows), jnp.concatenate([b.parents, parents], axis=1), pad_rows(b.depth, rows),
        square, pad_rows(b.valid, rows), b.chain,
    )  # fmt: skip
    weight = jnp.pad(candidates.weight, ((0, 0), (0, rows)), constant_values=-jnp.inf)
    return Candidates(block, weight)


def pad_rows(x: Array, rows: int) -> Array:
    return jnp.pad(x, [(0, rows if i == 1 else 0) for i in range(x.ndim)]) if rows else x


def top_k(x: Float[Array, "B c V"], k: int) -> tuple[Float[Array, "B c k"], Int[Array, "B c k"]]:
    """The k largest along the last axis, largest first.

    In two steps, because XLA's CPU sorts all of V: the k largest lie in the k groups with the largest maxima.
    """
    vocab = x.shape[-1]
    width = 1 << max(0, (math.isqrt(max(1, vocab // k)) - 1).bit_length())
    if vocab <= 4 * k * width:
        value, at = lax.top_k(x, k)
        return value, at
    groups = jnp.pad(x, ((0, 0), (0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
    groups = groups.reshape(*x.shape[:2], -1, width)
    # in order of index, so that of equal values the first counts, as in lax.top_k
    best = jnp.sort(lax.top_k(groups.max(-1), k)[1], axis=-1)
    inside = jnp.take_along_axis(groups, best[..., None], axis=2).reshape(*x.shape[:2], k * width)
    value, at = lax.top_k(inside, k)
    return value, jnp.take_along_axis(best, at // width, axis=-1) * width + at % width
