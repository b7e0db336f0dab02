"""A block is the set of tokens that one target forward looks at: a tree whose node 0 is the root.

A chain is a tree with one branch, so chain verify, tree verify and a chunk of the prompt are one
forward. Everything downstream (attention, convolution, recurrence, acceptance) reads `ancestors`
and `depth` and never asks which kind of block it was given. (DDTree, arXiv 2604.12989, verifies
trees; that a chain is the special case is this project's choice.)
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Block:
    """B trees of T nodes. Parents precede children: `parents[b, i] < i`, `parents[b, 0] = -1`.

    tokens     [B, T] i32   token of each node; node 0 is the anchor when verifying
    parents    [B, T] i32   index of the parent, -1 for the root
    depth      [B, T] i32   number of proper ancestors: position = length + depth
    ancestors  [B, T, T] bool   [i, j]: j is i or an ancestor of i
    valid      [B, T] bool  False for padding, which no other node sees and which is never committed
    chain      static: known to be a chain, which a long recurrence can use (gated_delta.py)
    """

    tokens: Array
    parents: Array
    depth: Array
    ancestors: Array
    valid: Array
    chain: bool = struct.field(pytree_node=False, default=False)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


def chain_block(tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Block:
    """The tree with one branch: node i follows node i - 1."""
    batch, size = tokens.shape
    steps = jnp.arange(size, dtype=jnp.int32)
    return Block(
        tokens=tokens,
        parents=jnp.broadcast_to(steps - 1, (batch, size)),
        depth=jnp.broadcast_to(steps, (batch, size)),
        ancestors=jnp.broadcast_to(jnp.tri(size, dtype=bool), (batch, size, size)),
        valid=jnp.ones((batch, size), bool) if valid is None else valid,
        chain=True,
    )


def tree_block(
    tokens: Int[Array, "B T"], parents: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None
) -> Block:
    """Any tree given by its parents.

    Ancestors are the reflexive transitive closure of the parent relation, by repeated squaring:
    after n squarings every path of up to 2^n edges is in, so log2(T) small matmuls replace a walk.
    """
    size = tokens.shape[1]
    reach = (parents[:, :, None] == jnp.arange(size)[None, None, :]) | jnp.eye(size, dtype=bool)[None]
    for _ in range(max(1, (size - 1).bit_length())):
        reach = jnp.einsum("bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32)) > 0
    return Block(
        tokens=tokens,
        parents=parents,
        depth=reach.sum(-1, dtype=jnp.int32) - 1,
        ancestors=reach,
        valid=jnp.ones(tokens.shape, bool) if valid is None else valid,
    )


def visible(block: Block) -> Bool[Array, "B T T"]:
    """[i, j]: node i attends to node j. Padding sees itself only: a softmax row that is masked
    everywhere would be NaN."""
    return (block.ancestors & block.valid[:, None, :]) | jnp.eye(block.size, dtype=bool)[None]
