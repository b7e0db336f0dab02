"""Block-size policies: how many candidates the next round drafts, and how many of them it verifies.

A policy is a frozen (hashable) object with three pure functions, so the compiled loop can carry its
state: `init() -> p`, `update(p, seen) -> p`, `choose(p) -> index into sizes` before the draft runs and
`choose(p, confidence) -> index into rows` after it. One size per batch and round. The stepwise loop takes
any Python object with the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.config import ConfigError


@struct.dataclass
class Seen:
    """What a round teaches. committed [B] i32: tokens of each row, 0 where it was done; drafted [] i32: the block
    size; verified [] i32: how many nodes the target looked at; expected [B] f32: the tokens that the draft's
    confidence promised of them, the anchor's own included."""

    committed: Array
    drafted: Array
    verified: Array
    expected: Array


@runtime_checkable
class Policy(Protocol):
    """sizes, rows: the compiled block sizes and numbers of verified nodes (both with the anchor), ascending.
    confidence [B, T]: log-probability of every candidate's path under the draft (0 for the anchor), -inf for
    padding and for rows that are done."""

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> tuple[int, ...]: ...
    def init(self) -> Any: ...
    def update(self, p: Any, seen: Seen) -> Any: ...
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

    def update(self, p: tuple[()], seen: Seen) -> tuple[()]:
        return p

    def choose(self, p: tuple[()], confidence: Array | None = None) -> int:
        return 0


@struct.dataclass
class History:
    """Decayed sums over rounds. accepted, reached [C-1]: how often candidate i was committed, and how often it was
    drafted and all before it committed (one that was not verified counts as not accepted); kept, promised:
    candidates committed, and what the draft's confidence promised of those that were verified; spent, whole: the
    time of the verifies, and of verifying all that was drafted. blind i32: rounds since all was last verified."""

    accepted: Array
    reached: Array
    kept: Array
    promised: Array
    spent: Array
    whole: Array
    blind: Array


@dataclass(frozen=True)
class Adaptive:
    """The size with the most tokens a second, from what was accepted lately and what each size costs.

    Before the draft: candidate i is accepted with a probability a_i, estimated from the rounds that reached it and
    drawn towards a_(i-1) where few did, so that a size that is not used is still judged, and tried again once its
    bad days are forgotten. A block of C is worth 1 + a_1 + a_1 a_2 + ... tokens, and costs its draft and the share
    of a whole verify that was lately spent on one.
    After the draft: n verified nodes are worth 1 + r * (sum of their paths' probabilities under the draft), with r
    the recent ratio of what was accepted to what was promised. For a chain this is how far to verify, for a
    tree its budget. What is drafted `look` rounds after a draft was last verified whole is verified whole, whatever
    it promises: a draft that promises too little would else never be found out.

    draft_ms, verify_ms: what each of `sizes` and `rows` costs on this device (any unit); a size of 1 drafts
    nothing, which makes autoregressive decoding one of the choices. Empty: a guess, one pass over the weights
    and a little for every row.
    """

    sizes: tuple[int, ...]
    rows: tuple[int, ...] = ()
    draft_ms: tuple[float, ...] = ()
    verify_ms: tuple[float, ...] = ()
    memory: float = 0.95
    prior: float = 0.7
    look: int = 16

    def __post_init__(self) -> None:
        for name, value in (
            ("rows", self.sizes),
            ("draft_ms", tuple(0.0 if n == 1 else 0.2 + n / 100 for n in self.sizes)),
            ("verify_ms", tuple(1 + n / 20 for n in self.rows or self.sizes)),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        _check(self.sizes)
        _check(self.rows)
        if len(self.draft_ms) != len(self.sizes) or len(self.verify_ms) != len(self.rows):
            raise ConfigError("adaptive policy: every block size and every number of rows needs its time")

    def init(self) -> History:
        none, zero = jnp.zeros(max(self.sizes[-1] - 1, 1), jnp.float32), jnp.zeros((), jnp.float32)
        return History(none, none, zero, zero, zero, zero, jnp.zeros((), jnp.int32))

    def update(self, p: History, seen: Seen) -> History:
        place = jnp.arange(1, p.accepted.shape[0] + 1)[None]
        active = (seen.committed > 0)[:, None]
        committed = seen.committed[:, None]
        reached = active & (committed >= place) & (place < seen.drafted)
        accepted = reached & (committed > place)
        # one round weighs 1, however many rows it has
        share = 1 / jnp.maximum(active.sum(), 1).astype(jnp.float32)
        more = jnp.where(
            active[:, 0], jnp.stack([seen.committed.astype(jnp.float32), seen.expected]) - 1, 0.0
        )
        drafts = (seen.drafted > 1) & active.any()
        block = jnp.searchsorted(jnp.asarray(self.sizes), seen.drafted)
        whole = jnp.asarray(self._whole)[block]
        verified = jnp.searchsorted(jnp.asarray(self.rows), seen.verified)
        times = jnp.where(drafts, jnp.asarray(self.verify_ms, jnp.float32)[jnp.stack([verified, whole])], 0.0)
        counts = jnp.stack([accepted, reached]).sum(1, dtype=jnp.float32)
        now = (*(share * counts), *(share * more.sum(-1)), *times)
        old = (p.accepted, p.reached, p.kept, p.promised, p.spent, p.whole)
        sums = [self.memory * was + new for was, new in zip(old, now, strict=True)]
        blind = jnp.where(drafts & (verified >= whole), 0, p.blind + 1)
        return History(*[*sums, blind])

    def choose(self, p: History, confidence: Float[Array, "B T"] | None = None) -> Int[Array, ""]:
        draft, verify = (jnp.asarray(ms, jnp.float32) for ms in (self.draft_ms, self.verify_ms))
        whole = jnp.asarray(self._whole)
        # what a verify after a draft costs, of a whole one; a size of 1 has no choice
        share = (p.spent + verify[-1]) / (p.whole + verify[-1])
        share = jnp.where(jnp.asarray(self.sizes) > 1, share, 1.0)
        block = jnp.argmax(self._worth_of_blocks(p) / (draft + share * verify[whole]))
        if confidence is None:
            return block.astype(jnp.int32)
        active = jnp.maximum((confidence[:, 0] > -jnp.inf).sum(), 1).astype(jnp.float32)
        ratio = (p.kept + self.prior) / (p.promised + 1)
        likely = jnp.minimum(ratio * jnp.exp(confidence[:, 1:]), 1.0).sum(0)
        worth = 1 + jnp.pad(jnp.cumsum(likely), (1, 0))[jnp.asarray(self.rows) - 1] / active
        best = jnp.argmax(worth / (draft[block] + verify))
        return jnp.where(p.blind >= self.look, whole[block], best).astype(jnp.int32)

    @property
    def _whole(self) -> list[int]:
        """Index into `rows` of the verify of all that a block of each size drafts: of a chain the cheapest that
        covers it; a tree (more rows than the largest block has) fills its budget from any depth but the anchor's."""
        tree = self.rows[-1] > self.sizes[-1]
        last = len(self.rows) - 1
        covers = [next((i for i, n in enumerate(self.rows) if n >= size), last) for size in self.sizes]
        return [last if tree and size > 1 else i for size, i in zip(self.sizes, covers, strict=True)]

    def _worth_of_blocks(self, p: History) -> Float[Array, " n"]:
        worth, survives, rate = [jnp.ones(())], jnp.ones(()), jnp.asarray(self.prior)
        for i in range(self.sizes[-1] - 1):
            rate = (p.accepted[i] + rate) / (p.reached[i] + 1.0)
            survives = survives * rate
            worth.append(worth[-1] + survives)
        return jnp.stack([worth[size - 1] for size in self.sizes])
