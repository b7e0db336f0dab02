"""Qwen3.5-MoE: the hybrid layers of Qwen3.5 with routed experts, and one that every token uses, for MLPs."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.config import MoeConfig
from dflash_jax.layers import Linear, SwiGLU
from dflash_jax.moe import route
from dflash_jax.targets import qwen3_5
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


class Layer(qwen3_5.Layer):
    def make_mlp(self) -> nn.Module:
        assert self.config.moe is not None
        return SparseMLP(self.config.moe, name="mlp")


class Qwen35Moe(qwen3_5.Qwen35):
    layer = Layer
