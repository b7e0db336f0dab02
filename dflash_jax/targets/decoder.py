"""The pass through a target that all families share: embed, layers with taps, norm, head.

Pure: the cache is read and not written. What the layers computed for the block comes back as the
trail, from which `cache.commit` selects.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.block import Block
from dflash_jax.cache import KVCache, RecurrentState, States, Tape, TargetCache, Trail
from dflash_jax.config import RECURRENT, TargetConfig
from dflash_jax.layers import Masks, RMSNorm, Rotation, Table, rotation, target_masks

Remember = Literal["tape", "states"]


@struct.dataclass
class TargetOutput:
    """logits   [B, T, V] float32, [B, 1, V] for "last", None when not asked for
    features [B, T, P*D]  the tapped layers' outputs, in the order of `taps`
    trail    what the layers computed for the block; see cache.commit
    """

    logits: Array | None
    features: Array
    trail: Trail


@struct.dataclass
class View:
    """What all layers of one forward share: the block, its rotation, and its masks by window."""

    block: Block
    turn: Rotation
    masks: dict[int | None, Masks]


class Decoder(nn.Module):
    """Base of the families. `layer` is the family's decoder layer: (config, index) -> module; `final_norm`
    its norm before the head: (eps) -> module."""

    config: TargetConfig
    layer: ClassVar[type[nn.Module]]
    final_norm: ClassVar[type[nn.Module]] = RMSNorm

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Table(c.vocab_size, c.hidden_size)
        self.layers = [self.layer(c, i) for i in range(c.num_layers)]
        self.norm = self.final_norm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Table(c.vocab_size, c.hidden_size)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.embed_tokens.embed(tokens)

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits (float32) of normed hidden states, the target's or a draft's."""
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        with jax.named_scope("head"):
            return table.head(hidden)

    def __call__(
        self,
        block: Block,
        cache: TargetCache,
        taps: tuple[int, ...] = (),
        logits: Literal["all", "last"] | None = "all",
        embeddings: Float[Array, "B T D"] | None = None,
        trail: Remember = "tape",
    ) -> TargetOutput:
        """One forward over a block.

        Tap l is the residual stream after layer l, before the final norm (Hugging Face
        `hidden_states[l + 1]`). "last" gives the logits of each row's last valid node.
        embeddings replaces the lookup of `block.tokens` (a table kept on the host).
        trail: what recurrent layers leave behind for a commit (cache.Tape or cache.States).
        """
        x = self.embed(block.tokens) if embeddings is None else embeddings
        # Padding is masked, but 0 * NaN is NaN: it must also be finite, whatever a caller left there.
        x = jnp.where(block.valid[:, :, None], x, jnp.zeros((), x.dtype))
        view = self.view(block, cache.length, cache.slots)
        tapped: dict[int, Array] = {}
        left = []
        for i in range(self.config.num_layers):
            with jax.named_scope(f"layer_{i}"):
                x, rows = self.run_layer(i, x, view, cache.layers[i], trail)
            left.append(rows)
            if i in taps:
                tapped[i] = x
        features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else x[..., :0]
        return TargetOutput(self.read_out(x, block, logits), features, tuple(left))

    def view(self, block: Block, length: Int[Array, " B"], slots: int) -> View:
        c = self.config
        windows = {c.window(i) for i in range(c.num_layers) if c.layer_types[i] != RECURRENT}
        return View(
            block,
            rotation(c.rope, c.rotary_dim, length[:, None] + block.depth),
            {window: target_masks(block, length, slots, window) for window in windows},
        )

    def run_layer(
        self,
        index: int,
        x: Float[Array, "B T D"],
        view: View,
        cache: KVCache | RecurrentState,
        trail: Remember,
    ) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
        """Layer `index`: the residual stream after it, and what it leaves behind."""
        return self.layers[index](x, view.turn, view.masks[self.config.window(index)], cache)

    def read_out(self, x: Float[Array, "B T D"], block: Block, which: str | None) -> Array | None:
        """Logits of the residual stream after the last layer; which: see __call__."""
        if which is None:
            return None
        if which == "last":
            last = jnp.maximum(block.valid.sum(-1) - 1, 0)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.head(self.norm(x))
