"""The DFlash draft (arXiv 2602.06036, 3.1-3.3; z-lab `DFlashDraftModel`).

A few Qwen3-like layers that denoise `[anchor, MASK x (C-1)]` in one pass. What makes it good is
what it sees: every committed position's hidden states of the target (`features`), fused once and
*injected as keys and values* into every draft layer. The draft's cache holds those context keys and
values; the block's own are used once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.cache import DraftCache, KVCache, draft_cache, extend_context
from dflash_jax.config import DraftConfig
from dflash_jax.layers import (
    Linear,
    Masks,
    RMSNorm,
    Rotation,
    SwiGLU,
    attend,
    committed_mask,
    head_major,
    heads,
    rotate,
    rotation,
)


class Attention(nn.Module):
    config: DraftConfig

    def setup(self) -> None:
        c = self.config
        self.q_proj = Linear(c.num_heads * c.head_dim, c.attention_bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, c.attention_bias)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, c.attention_bias)
        self.o_proj = Linear(c.hidden_size, c.attention_bias)
        self.q_norm = RMSNorm(c.rms_norm_eps)
        self.k_norm = RMSNorm(c.rms_norm_eps)

    def keys_values(self, x: Float[Array, "B T D"], turn: Rotation) -> KVCache:
        """The same projections serve the block's rows and the injected context."""
        k = rotate(self.k_norm(heads(self.k_proj(x), self.config.head_dim)), turn)
        return KVCache(head_major(k), head_major(heads(self.v_proj(x), self.config.head_dim)))

    def __call__(
        self, x: Float[Array, "B C D"], turn: Rotation, masks: Masks, context: KVCache
    ) -> Float[Array, "B C D"]:
        q = rotate(self.q_norm(heads(self.q_proj(x), self.config.head_dim)), turn)
        return self.o_proj(attend(q, self.keys_values(x, turn), context, masks))


class Layer(nn.Module):
    config: DraftConfig

    def setup(self) -> None:
        self.self_attn = Attention(self.config)
        self.mlp = SwiGLU(self.config.intermediate_size)
        self.input_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "B C D"], turn: Rotation, masks: Masks, context: KVCache
    ) -> Float[Array, "B C D"]:
        x = x + self.self_attn(self.input_layernorm(x), turn, masks, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    config: DraftConfig

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.hidden_size)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [Layer(c) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def fuse(self, features: Float[Array, "B T PD"]) -> Float[Array, "B T D"]:
        """Feature fusion (paper 3.2): P tapped states per position to one context vector."""
        return self.hidden_norm(self.fc(features))

    def context_rows(
        self, features: Float[Array, "B T PD"], positions: Int[Array, "B T"]
    ) -> tuple[KVCache, ...]:
        """KV injection (paper 3.2): the context's keys and values in every layer. The context does
        not pass through a layer's input norm."""
        context = self.fuse(features)
        turn = rotation(self.config.rope, self.config.head_dim, positions)
        return tuple(layer.self_attn.keys_values(context, turn) for layer in self.layers)

    def extend(
        self, cache: DraftCache, features: Float[Array, "B T PD"], count: Int[Array, " B"]
    ) -> DraftCache:
        """The context grown by the first `count[b]` rows: features of newly committed positions."""
        with jax.named_scope("draft_extend"):
            positions = cache.length[:, None] + jnp.arange(features.shape[1])[None]
            return extend_context(cache, self.context_rows(features, positions), count)

    def propose(self, cache: DraftCache, embeddings: Float[Array, "B C D"]) -> Float[Array, "B c D"]:
        """Final hidden states of positions 1..C-1 for a block of embeddings [anchor, MASK...].

        Position 0 is the anchor, known already: its output is not used.
        """
        c = self.config
        size = embeddings.shape[1]
        positions = cache.length[:, None] + jnp.arange(size)[None]
        turn = rotation(c.rope, c.head_dim, positions)
        x = embeddings * jnp.asarray(c.embedding_scale, embeddings.dtype)
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{i}"):
                x = layer(x, turn, self._masks(cache, positions, i), cache.layers[i])
        return self.norm(x)[:, 1:]

    def _masks(self, cache: DraftCache, positions: Int[Array, "B C"], layer: int) -> Masks:
        """Bidirectional inside the block unless the layer is causal; the window, if any, counts in
        both directions (causality already rules out the second)."""
        window = self.config.window(layer)
        ahead = positions[:, None, :] - positions[:, :, None]  # key position - query position
        block = ahead <= 0 if self.config.causal[layer] else jnp.ones_like(ahead, bool)
        if window is not None:
            block = block & (jnp.abs(ahead) < window)
        return Masks(committed_mask(cache.length, positions, cache.slots, window, cache.ring), block)

    def logits(self, hidden: Float[Array, "B c D"], head: Callable[[Array], Array]) -> Float[Array, "B c V"]:
        """The target's head on the draft's hidden states, then the draft's own scale and softcap."""
        logits = head(hidden) * self.config.logit_scale
        if self.config.softcap > 0:
            logits = jnp.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def __call__(
        self, cache: DraftCache, features: Float[Array, "B T PD"], embeddings: Float[Array, "B C D"]
    ) -> Float[Array, "B c D"]:
        """Extend by all rows, then propose: what initialises every parameter."""
        count = jnp.full(features.shape[0], features.shape[1], jnp.int32)
        return self.propose(self.extend(cache, features, count), embeddings)


def init_params(config: DraftConfig, key: jax.Array) -> dict:
    """Random float32 parameters (normal, 0.02)."""
    features = jnp.zeros((1, 1, len(config.taps) * config.hidden_size))
    embeddings = jnp.zeros((1, config.block_size, config.hidden_size))
    cache = draft_cache(config, 1, 1 + config.block_size, jnp.float32)
    return DFlash(config).init(key, cache, features, embeddings)["params"]


def abstract_params(config: DraftConfig) -> dict:
    """The nested dict of jax.ShapeDtypeStruct that loaders fill: nothing is allocated."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
