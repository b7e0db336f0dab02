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
from dflash_jax.cache import TargetCache, Trail
from dflash_jax.config import TargetConfig
from dflash_jax.layers import RMSNorm, Table, rotation, target_masks


@struct.dataclass
class TargetOutput:
    """logits   [B, T, V] float32, [B, 1, V] for "last", None when not asked for
    features [B, T, P*D]  the tapped layers' outputs, in the order of `taps`
    trail    what the layers computed for the block; see cache.commit
    """

    logits: Array | None
    features: Array
    trail: Trail


class Decoder(nn.Module):
    """Base of the families. `layer` is the family's decoder layer: (config, index) -> module."""

    config: TargetConfig
    layer: ClassVar[type[nn.Module]]

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Table(c.vocab_size, c.hidden_size)
        self.layers = [self.layer(c, i) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
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
    ) -> TargetOutput:
        """One forward over a block.

        Tap l is the residual stream after layer l, before the final norm (Hugging Face
        `hidden_states[l + 1]`). "last" gives the logits of each row's last valid node.
        embeddings replaces the lookup of `block.tokens` (a table kept on the host).
        """
        c = self.config
        x = self.embed(block.tokens) if embeddings is None else embeddings
        # Padding is masked, but 0 * NaN is NaN: it must also be finite, whatever a caller left there.
        x = jnp.where(block.valid[:, :, None], x, jnp.zeros((), x.dtype))
        turn = rotation(c.rope, c.head_dim, cache.length[:, None] + block.depth)
        masks = {
            window: target_masks(block, cache.length, cache.layers[0].slots, window)
            for window in {c.window(i) for i in range(c.num_layers)}
        }
        tapped: dict[int, Array] = {}
        trail = []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x, rows = layer(x, turn, masks[c.window(i)], cache.layers[i])
            trail.append(rows)
            if i in taps:
                tapped[i] = x
        features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else x[..., :0]
        return TargetOutput(self._logits(x, block, logits), features, tuple(trail))

    def _logits(self, x: Array, block: Block, which: str | None) -> Array | None:
        if which is None:
            return None
        if which == "last":
            last = jnp.maximum(block.valid.sum(-1) - 1, 0)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.head(self.norm(x))
