"""Qwen3.5-MoE: the hybrid layers of Qwen3.5 with routed experts, and one that every token uses, for MLPs."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.cache import KVCache, RecurrentState, States, Tape
from dflash_jax.config import MoeConfig, TargetConfig
from dflash_jax.layers import Linear, SwiGLU
from dflash_jax.moe import route
from dflash_jax.targets.decoder import Decoder, Remember, View
from dflash_jax.targets.qwen3_5 import Attention, GatedDelta, Norm
from dflash_jax.targets.qwen3_moe import Experts


class SparseMLP(nn.Module):
    """Routed experts beside a shared one, which has a gate of its own: one number a token."""

    config: MoeConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        to = route(Linear(c.experts, name="gate")(x), c.per_token, c.normalise)
        y = Experts(c, name="experts")(x, to)
        shared = SwiGLU(c.shared_intermediate_size, name="shared_expert")(x)
        return y + nn.sigmoid(Linear(1, name="shared_expert_gate")(x)) * shared


class Layer(nn.Module):
    config: TargetConfig
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], view: View, cache: KVCache | RecurrentState, trail: Remember
    ) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
        c = self.config
        assert c.moe is not None
        h = Norm(c.rms_norm_eps, name="input_layernorm")(x)
        y: Array
        left: KVCache | Tape | States
        if isinstance(cache, RecurrentState):
            y, left = GatedDelta(c, name="linear_attn")(h, view.block, cache, trail)
        else:
            y, left = Attention(c, name="self_attn")(h, view.turn, view.masks[c.window(self.index)], cache)
        x = x + y
        return x + SparseMLP(c.moe, name="mlp")(
            Norm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        ), left


class Qwen35Moe(Decoder):
    layer = Layer
    final_norm = Norm

    def run_layer(
        self,
        index: int,
        x: Float[Array, "B T D"],
        view: View,
        cache: KVCache | RecurrentState,
        trail: Remember,
    ) -> tuple[Float[Array, "B T D"], KVCache | Tape | States]:
        return self.layers[index](x, view, cache, trail)
