"""What a round runs, its static choices, and everything that it carries: frozen pytrees."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block
from dflash_jax.cache import DraftCache, TargetCache
from dflash_jax.drafts.dflash import DFlash
from dflash_jax.embedding import HostTable
from dflash_jax.numerics import contract
from dflash_jax.policy import Fixed, Policy, Seen
from dflash_jax.sampling import Acceptance, Sampling
from dflash_jax.targets import Decoder
from dflash_jax.tree import TreeShape

RUNNING, STOP, LENGTH = 0, 1, 2  # finish reasons


@struct.dataclass
class Models:
    """What a round runs: pure modules (static) and their parameters. draft None: autoregressive.

    table: the embedding table, when it is on the host; target_params hold it only if it is the head too.
    draft_head: the first n rows [n, D] of the head, when the draft chooses among these ids only.
    """

    target_params: Any
    draft_params: Any = None
    target: Decoder = struct.field(pytree_node=False, default=None)
    draft: DFlash | None = struct.field(pytree_node=False, default=None)
    table: HostTable | None = struct.field(pytree_node=False, default=None)
    draft_head: Array | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.config.taps if self.draft else ()

    def without_draft(self) -> Models:
        return dataclasses.replace(self, draft=None, draft_params=None, draft_head=None)

    def choosing_among(self, n: int) -> Models:
        """The same models, where the draft's candidates have ids below n: its head costs n rows instead of V.

        FR-Spec (arXiv 2502.14856), which counts how frequent tokens are; in a BPE vocabulary the ids say it,
        as they are in the order of the merges. A token beyond can still be emitted: the target chooses among all.
        The rows are copied, because a slice inside a program would be cut in every round.
        """
        table = "embed_tokens" if self.target.config.tie_word_embeddings else "lm_head"
        return dataclasses.replace(self, draft_head=self.target_params[table]["weight"][:n])

    @property
    def of_target(self) -> Models:
        """What programs of the target take: the draft's parameters may be on another device."""
        return dataclasses.replace(self, draft_params=None, table=None)

    @property
    def of_draft(self) -> Models:
        return dataclasses.replace(self, target_params=None, table=None, draft_head=None)

    @property
    def choices(self) -> int:
        """How many token ids the draft chooses among."""
        return self.target.config.vocab_size if self.draft_head is None else self.draft_head.shape[0]

    def draft_logits(self, hidden: Float[Array, "B c D"]) -> Float[Array, "B c v"]:
        """What the draft chooses by; v is V, or the rows of draft_head."""
        assert self.draft is not None
        if self.draft_head is None:
            return self.draft.logits(hidden, partial(self.run_target, method="head"))
        return self.draft.logits(hidden, partial(contract, "vd,btd->btv", self.draft_head))

    @property
    def apart(self) -> bool:
        """The draft is on another device than the target."""
        first = [jax.tree.leaves(params)[:1] for params in (self.target_params, self.draft_params)]
        places = [leaf.devices() for leaves in first for leaf in leaves if isinstance(leaf, jax.Array)]
        return len(places) == 2 and places[0] != places[1]

    @property
    def in_pieces(self) -> bool:
        """No single program can run a round: only the stepwise loop can."""
        return self.apart or self.table is not None

    def look_up(self, tokens: Any, like: Array) -> Array | None:
        """Embeddings from the table on the host, beside `like`; None: programs look them up themselves."""
        return None if self.table is None else self.table.rows(tokens, like)

    def run_target(self, *args: Any, **kwargs: Any) -> Any:
        return self.target.apply({"params": self.target_params}, *args, **kwargs)

    def run_draft(self, *args: Any, method: str) -> Any:
        assert self.draft is not None
        return self.draft.apply({"params": self.draft_params}, *args, method=method)


@dataclass(frozen=True)
class Options:
    """Static choices of a compiled round.

    policy: block sizes (anchor included). tree: candidates form a tree of this shape; None: a chain.
    proposal: candidates are the draft's best (matching), or samples of it (rejection; chains only, needs
    temperature > 0). logprobs: keep log p of every emitted token.
    rollback: what a verify remembers of recurrent layers, so that any node can be committed: a "tape" or
    all "states"; "replay" remembers nothing and forwards the accepted tokens again (stepwise loop only).
    """

    policy: Policy
    proposal: Literal["argmax", "sample"] = "argmax"
    logprobs: bool = False
    rollback: Literal["tape", "states", "replay"] = "tape"
    tree: TreeShape | None = None

    @property
    def largest(self) -> int:
        """The largest block: no round commits more."""
        return self.policy.sizes[-1]

    @property
    def nodes(self) -> int:
        """The most nodes that a round verifies."""
        return self.policy.rows[-1]


AUTOREGRESSIVE = Options(Fixed(1))


@struct.dataclass
class RoundState:
    """Everything a generation is. Immutable: an old state can be kept and continued twice.

    Invariant: target_cache.length == draft_cache.length == prompt + emitted - 1 (the anchor, the
    newest emitted token, is in no cache yet).

    tokens [B, N] i32 and emitted [B]: the output so far; limit [B]: its budget. logprobs [B, N] f32.
    committed [B, R] i32: tokens kept per row and round; sizes [R]: the most that a row of each round could
    have kept (the longest path that was verified, anchor included); nodes [R]: how many nodes it verified;
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
    nodes: Array
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
    acceptance.choices the target's; seen: what the stop tokens and the budget left of it."""

    block: Block
    acceptance: Acceptance
    seen: Seen

    @property
    def kept(self) -> Array:
        """[B] i32: tokens that each row committed."""
        return self.seen.committed


def cut(
    state: RoundState, tokens: Int[Array, "B T"], count: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the new tokens each row keeps, and why it ends. A row that is done keeps none."""
    index = jnp.arange(tokens.shape[1])[None]
    stop = (tokens[:, :, None] == state.stops[None, None, :]).any(-1) & (index < count[:, None])
    first_stop = jnp.where(stop.any(-1), jnp.argmax(stop, axis=-1), tokens.shape[1])
    room = state.limit - state.emitted
    kept = jnp.minimum(jnp.minimum(count, first_stop + 1), room)
    kept = jnp.where(state.done, 0, kept).astype(jnp.int32)
    ended = jnp.where(first_stop < kept, STOP, jnp.where(kept == room, LENGTH, RUNNING))
    return kept, jnp.where(state.done, state.reason, ended.astype(jnp.int32))


def emit(buffer: Array, new: Array, at: Int[Array, " B"]) -> Array:
    """new[b] written at at[b]; what exceeds a row's count is overwritten by its next round."""
    return jax.vmap(lambda row, values, start: lax.dynamic_update_slice(row, values, (start,)))(
        buffer, new, at
    )
