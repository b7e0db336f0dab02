"""What a round runs, its static choices, and everything that it carries: frozen pytrees."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from flax import struct
from jaxtyping import Array

from dflash_jax.block import Block
from dflash_jax.cache import DraftCache, TargetCache
from dflash_jax.drafts.dflash import DFlash
from dflash_jax.policy import Fixed, Policy
from dflash_jax.sampling import Acceptance, Sampling
from dflash_jax.targets import Decoder

RUNNING, STOP, LENGTH = 0, 1, 2  # finish reasons


@struct.dataclass
class Models:
    """What a round runs: pure modules (static) and their parameters. draft None: autoregressive."""

    target_params: Any
    draft_params: Any = None
    target: Decoder = struct.field(pytree_node=False, default=None)
    draft: DFlash | None = struct.field(pytree_node=False, default=None)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.config.taps if self.draft else ()

    def without_draft(self) -> Models:
        return dataclasses.replace(self, draft=None, draft_params=None)


@dataclass(frozen=True)
class Options:
    """Static choices of a compiled round.

    policy: block sizes (anchor included). proposal: candidates are the draft's argmax (matching), or
    samples of it (rejection; needs temperature > 0). logprobs: keep log p of every emitted token.
    """

    policy: Policy
    proposal: Literal["argmax", "sample"] = "argmax"
    logprobs: bool = False

    @property
    def largest(self) -> int:
        return self.policy.sizes[-1]


AUTOREGRESSIVE = Options(Fixed(1))


@struct.dataclass
class RoundState:
    """Everything a generation is. Immutable: an old state can be kept and continued twice.

    Invariant: target_cache.length == draft_cache.length == prompt + emitted - 1 (the anchor, the
    newest emitted token, is in no cache yet).

    tokens [B, N] i32 and emitted [B]: the output so far; limit [B]: its budget. logprobs [B, N] f32.
    committed [B, R] i32: tokens kept per row and round; sizes [R]: the block size of each round;
    rounds []: how many ran. done [B], reason [B]: RUNNING, STOP or LENGTH. stops [n] i32: stop ids.
    """

    target_cache: TargetCache
    draft_cache: DraftCache | None
    anchor: Array
    tokens: Array
    logprobs: Array
    emitted: Array
    limit: Array
    committed: Array
    sizes: Array
    rounds: Array
    reason: Array
    seeds: Array
    stops: Array
    policy: Any
    sampling: Sampling

    @property
    def done(self) -> Array:
        return self.reason != RUNNING

    @property
    def largest(self) -> int:
        """The largest block that the buffers were allocated for."""
        return self.tokens.shape[1] - self.committed.shape[1]


@struct.dataclass
class RoundTrace:
    """What one round saw, for looking inside: block.tokens are the anchor and the candidates,
    acceptance.choices the target's; kept [B] is what the stop tokens and the budget left."""

    block: Block
    acceptance: Acceptance
    kept: Array
