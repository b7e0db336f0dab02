"""Qwen3-MoE: Qwen3 with routed experts for the MLPs of some layers (in published models, of all)."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.cache import KVCache
from dflash_jax.config import MoeConfig, TargetConfig
from dflash_jax.layers import Linear, Masks, RMSNorm, Rotation, SwiGLU, parameter
from dflash_jax.moe import Routing, route, run_experts
from dflash_jax.targets.decoder import Decoder
from dflash_jax.targets.qwen3 import Attention


class Experts(nn.Module):
    """The weights of all experts, fused: gate_up_proj [E, 2I, D], gate first; down_proj [E, D, I]."""

    config: MoeConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], to: Routing) -> Float[Array, "B T D"]:
        c, hidden, init = self.config, x.shape[-1], nn.initializers.normal(0.02)
        gate_up = parameter(self, "gate_up_proj", init, (c.experts, 2 * c.intermediate_size, hidden))
        down = parameter(self, "down_proj", init, (c.experts, hidden, c.intermediate_size))
        return run_experts(x, to, gate_up, down)


class SparseMLP(nn.Module):
    config: MoeConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        to = route(Linear(c.experts, name="gate")(x), c.per_token, c.normalise)
        return Experts(c, name="experts")(x, to)


class Layer(nn.Module):
    config: TargetConfig
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], turn: Rotation, masks: Masks, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        c = self.config
        assert c.moe is not None
        y, new = Attention(c, name="self_attn")(
            RMSNorm(c.rms_norm_eps, name="input_layernorm")(x), turn, masks, cache
        )
        x = x + y
        h = RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        routed = c.moe.layers[self.index]
        mlp = SparseMLP(c.moe, name="mlp") if routed else SwiGLU(c.intermediate_size, c.mlp_bias, name="mlp")
        return x + mlp(h), new


class Qwen3Moe(Decoder):
    layer = Layer
