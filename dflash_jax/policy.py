"""Block-size policies: how many rows the next round drafts and verifies.

A policy is a frozen (hashable) object with three pure functions, so the compiled loop can carry its
state: `init() -> p`, `update(p, committed, expected) -> p`, `choose(p) -> index into sizes` before the
draft runs and `choose(p, confidence) -> index into rows` after it. One size per batch and round. The
stepwise loop takes any Python object with the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import ConfigError


@runtime_checkable
class Policy(Protocol):
    """sizes, rows: the compiled block sizes and numbers of verified nodes (both with the anchor), ascending.
    confidence [B, T]: log-probability of every candidate's path under the draft, -inf for padding and for
    rows that are done. committed [B]: tokens each row committed in the round, 0 for rows that are done;
    expected [B]: what the draft's confidence promised of the nodes that were verified."""

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> tuple[int, ...]: ...
    def init(self) -> Any: ...
    def update(self, p: Any, committed: Int[Array, " B"], expected: Float[Array, " B"]) -> Any: ...
    def choose(self, p: Any, confidence: Array | None = None) -> Any: ...


def _check(sizes: tuple[int, ...]) -> None:
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ConfigError(f"block sizes {sizes} must be positive, ascending and distinct")


@dataclass(frozen=True)
class Fixed:
    """verified: nodes that the target looks at, when they are not the block (a tree)."""

    size: int
    verified: int = 0

    def __post_init__(self) -> None:
        _check(self.sizes)
        _check(self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.verified or self.size,)

    def init(self) -> tuple[()]:
        return ()

    def update(self, p: tuple[()], committed: Array, expected: Array) -> tuple[()]:
        return p

    def choose(self, p: tuple[()], confidence: Array | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Adaptive:
    """The smallest size with room for `headroom` times the recent mean of accepted candidates.

    A block that is accepted whole says only "at least this many", so the mean that a small size can
    show must be able to ask for the next one: with headroom 2, a size C that is accepted whole asks
    for 2 C - 1. Counted in candidates, because committed tokens never fall to 1 on average once one
    was accepted: twice a mean just above 1 would keep the smallest size, 2, out of reach.
    """

    sizes: tuple[int, ...]
    headroom: float = 2.0
    memory: float = 0.8

    def __post_init__(self) -> None:
        _check(self.sizes)

    @property
    def rows(self) -> tuple[int, ...]:
        """The whole block is verified, whatever the draft thinks of it."""
        return self.sizes

    def init(self) -> Float[Array, ""]:
        return jnp.asarray(1 + (self.sizes[-1] - 1) / self.headroom, jnp.float32)

    def update(
        self, p: Float[Array, ""], committed: Int[Array, " B"], expected: Float[Array, " B"]
    ) -> Float[Array, ""]:
        active = jnp.maximum((committed > 0).sum(), 1)
        mean = committed.sum().astype(jnp.float32) / active.astype(jnp.float32)
        return self.memory * p + (1 - self.memory) * mean

    def choose(self, p: Float[Array, ""], confidence: Array | None = None) -> Int[Array, ""]:
        too_small = jnp.asarray(self.sizes, jnp.float32) < 1 + self.headroom * (p - 1)
        return jnp.minimum(too_small.sum(dtype=jnp.int32), len(self.sizes) - 1)
