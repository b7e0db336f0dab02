"""Qwen2 and Qwen2.5: the Llama layer with biases on q, k and v, which its config states."""

from __future__ import annotations

from dflash_jax.targets.decoder import Decoder
from dflash_jax.targets.llama import Layer


class Qwen2(Decoder):
    layer = Layer
