"""RoPE in GGUF metadata, of targets and drafts: `rope.freq_base`, `rope.scaling.*`, and llama3's scaling as the
tensor `rope_freqs`, one divisor for each frequency.

Source: llama.cpp `llama-context.cpp`, `conversion/llama.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflash_jax.config import ConfigError, RopeConfig
from dflash_jax.weights.fields import Fields

ROPE_FREQS = "rope_freqs.weight"


def read(fields: Fields, max_positions: int, divisors: tuple[float, ...] = ()) -> RopeConfig:
    """fields: the keys of one architecture, without its prefix. max_positions: the context before extension
    where yarn names none."""
    theta = fields.number("rope.freq_base")
    kind = fields.text("rope.scaling.type", "none")
    factor = (
        fields.number("rope.scaling.factor", 1.0) if kind == "none" else fields.number("rope.scaling.factor")
    )
    if kind == "none" and "rope.scale_linear" in fields:  # as it was written before rope.scaling.type
        kind, factor = "linear", fields.number("rope.scale_linear")
    if kind == "none":
        return RopeConfig(theta, divisors=divisors)
    if divisors:
        raise fields.error(
            "rope.scaling.type", f"is '{kind}' beside {ROPE_FREQS}: both at once is not supported"
        )
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", f"is '{kind}': none, linear or yarn is supported")
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise fields.error("rope.scaling.yarn_log_multiplier", "other than 0 is not supported")
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise fields.error("rope.scaling.yarn_ext_factor", "other than 1 is not supported")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length", max_positions),
        attention_factor=_attention_factor(fields, factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _attention_factor(fields: Fields, factor: float) -> float | None:
    """yarn's scale of cos and sin. The converter writes Hugging Face's attention_factor, the whole scale,
    as `yarn_attn_factor`; `attn_factor` multiplies yarn's own scale instead (llama.cpp, llama-context)."""
    whole = fields.number("rope.scaling.yarn_attn_factor", None)
    multiplier = fields.number("rope.scaling.attn_factor", 1.0)
    if multiplier == 1.0:
        return whole
    return multiplier * (_mscale(factor, 1.0) if whole is None else whole)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def write(rope: RopeConfig) -> dict[str, Any]:
    """The keys that `read` reads. ConfigError for what has none: llama3 (a tensor in targets, nothing in
    drafts) and yarn without truncation."""
    if rope.divisors or rope.type == "llama3":
        raise ConfigError("llama3 rope scaling has no form in the metadata of a GGUF file")
    written: dict[str, Any] = {"rope.freq_base": rope.theta}
    if rope.type == "default":
        return written
    written |= {"rope.scaling.type": rope.type, "rope.scaling.factor": rope.factor}
    if rope.type == "linear":
        return written
    if not rope.truncate:
        raise ConfigError("yarn with truncate false has no form in a GGUF file")
    whole = rope.attention_factor
    if whole is None and rope.mscale and rope.mscale_all_dim:
        whole = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return written | {
        "rope.scaling.original_context_length": rope.original_max_positions,
        "rope.scaling.yarn_attn_factor": whole,
        "rope.scaling.yarn_beta_fast": rope.beta_fast,
        "rope.scaling.yarn_beta_slow": rope.beta_slow,
    }


def divisors(rope: RopeConfig, rotary_dim: int) -> np.ndarray | None:
    """What `rope_freqs` of a target holds, float32 [rotary_dim / 2]; None where there is no such scaling.

    llama3: long wavelengths are stretched by `factor`, short ones not at all, and those between by a blend of
    the frequencies.
    """
    if rope.divisors:
        return np.asarray(rope.divisors, np.float32)
    if rope.type != "llama3":
        return None
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = rope.original_max_positions / wavelengths
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 / ((1 - kept) / rope.factor + kept)).astype(np.float32)
