"""Targets written as GGUF: `llama`, `qwen2` and `qwen3`, as llama.cpp's converter does (the inverse of gguf and
gguf_layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import FULL, ConfigError, RopeConfig, TargetConfig
from dflash_jax.weights import gguf_rope, gguf_writer
from dflash_jax.weights.fields import naming
from dflash_jax.weights.gguf_file import read_file
from dflash_jax.weights.names import TARGET_GGUF
from dflash_jax.weights.tensors import flatten

FAMILIES = ("llama", "qwen2", "qwen3")


def save_target(
    path: str | Path,
    config: TargetConfig,
    params: Mapping[str, Any],
    kind: str,
    vocabulary: Mapping[str, Any] | None = None,
) -> int:
    """Write a target, matrices as `kind` (gguf_writer.KINDS), vectors in float32; returns the file's bytes.

    vocabulary: its `tokenizer.*` metadata; without it the file holds weights only. ConfigError for models
    that are not written.
    """
    if config.family not in FAMILIES or set(config.layer_types) != {FULL}:
        raise ConfigError(
            f"{path}: targets of the families {', '.join(FAMILIES)} are written as GGUF, with full attention in "
            f"all layers: this is {config.family}"
        )
    tensors = {
        TARGET_GGUF.to_file(name): _laid_out(name, np.asarray(value), config)
        for name, value in flatten(params).items()
    }
    freqs = gguf_rope.divisors(config.rope, config.rotary_dim)
    rope = config.rope
    if freqs is not None:
        tensors[gguf_rope.ROPE_FREQS], rope = freqs, RopeConfig(config.rope.theta)
    with naming(path):
        metadata = _metadata(config) | gguf_rope.write(rope)
    own = {f"{config.family}.{key}": value for key, value in metadata.items() if value is not None}
    everything = {"general.type": "model"} | own | dict(vocabulary or {})
    return gguf_writer.write(Path(path), config.family, everything, tensors, kind)


def vocabulary(path: str | Path) -> dict[str, Any]:
    """The `tokenizer.*` metadata of a GGUF file."""
    return {k: v for k, v in read_file(path).metadata.items() if k.startswith("tokenizer.")}


def _metadata(config: TargetConfig) -> dict[str, Any]:
    return {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.rotary_dim,
        "vocab_size": config.vocab_size,
    }


def _laid_out(name: str, value: np.ndarray, config: TargetConfig) -> np.ndarray:
    """q and k of `llama`: dimensions i and i + H/2 of a head side by side, for rotation in pairs."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if config.family != "llama" or heads is None:
        return value
    halves = value.reshape(heads, 2, config.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(value.shape)
