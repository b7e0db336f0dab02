"""Target families. A plain dict: the key is `TargetConfig.family`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.block import chain_block
from dflash_jax.cache import target_cache
from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.targets.decoder import Decoder, TargetOutput
from dflash_jax.targets.llama import Llama
from dflash_jax.targets.qwen2 import Qwen2
from dflash_jax.targets.qwen3 import Qwen3
from dflash_jax.targets.qwen3_5 import Qwen35
from dflash_jax.targets.qwen3_5_moe import Qwen35Moe
from dflash_jax.targets.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35Moe,
}

__all__ = ["FAMILIES", "Decoder", "TargetOutput", "abstract_params", "init_params", "make_target"]


def make_target(config: TargetConfig) -> Decoder:
    if config.family not in FAMILIES:
        raise ConfigError(f"target family '{config.family}' is not supported: one of {', '.join(FAMILIES)}")
    return FAMILIES[config.family](config)


def init_params(config: TargetConfig, key: jax.Array) -> dict:
    """Random float32 parameters (normal, 0.02)."""
    block = chain_block(jnp.zeros((1, 1), jnp.int32))
    cache = target_cache(config, 1, 1, jnp.float32)
    return make_target(config).init(key, block, cache)["params"]


def abstract_params(config: TargetConfig) -> dict:
    """The nested dict of jax.ShapeDtypeStruct that loaders fill: nothing is allocated."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
