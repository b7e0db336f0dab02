"""GGUF targets of the architectures below, in any quantisation that gguf-py decodes: the metadata that
makes a config. How tensors lie in such files is said in gguf_layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_jax.config import (
    FULL,
    RECURRENT,
    ConfigError,
    MoeConfig,
    RecurrentConfig,
    TargetConfig,
)
from dflash_jax.weights import draft_schema, gguf_rope
from dflash_jax.weights.fields import MAX_LAYERS, Fields, naming
from dflash_jax.weights.gguf_file import GGUFFile, read_file
from dflash_jax.weights.gguf_layout import expected, problems, restored
from dflash_jax.weights.gguf_rope import ROPE_FREQS
from dflash_jax.weights.tensors import check, load

# general.architecture -> the family of targets
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
_HYBRID = ("qwen35", "qwen35moe")
_ROUTED = ("qwen3moe", "qwen35moe")
# Architectures of DFlash drafts and who writes them; of one that two families share, the first.
DRAFTS = {family.architecture: family.writer for family in reversed(draft_schema.FAMILIES)}


def target_config(path: str | Path) -> TargetConfig:
    """Read the metadata of a GGUF target.

    Raises ConfigError for another architecture (a DFlash draft is named as such), for metadata that
    is missing or not supported, and for everything gguf_file.read_file refuses.
    """
    file = read_file(path)
    name = _architecture(file)
    fields = _section(file, name)
    experts = fields.integer("expert_count", 0)
    if experts and name not in _ROUTED:
        raise fields.error("expert_count", f"marks a mixture of experts: '{name}' with them is not supported")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{file.path}: has no tensor token_embd.weight [V, D]: not a complete model")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    layers = _depth(fields, len(file.tensors))
    head_dim, rotary_dim = _head_dim(fields, hidden, heads, partial=name in _HYBRID)
    max_positions = fields.integer("context_length", 0)
    _refuse_window(fields, max_positions)
    with naming(file.path):
        moe = _read_moe(fields, name, layers) if name in _ROUTED else None
        return TargetConfig(
            family=ARCHITECTURES[name],
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(fields, heads),
            head_dim=head_dim,
            intermediate_size=_intermediate_size(fields, name, moe),
            vocab_size=table.shape[0],
            rope=gguf_rope.read(fields, max_positions, _divisors(file, rotary_dim)),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            # GGUF has no flags for biases: the tensors are there or not
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            attention_out_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            layer_types=_layer_types(fields, layers) if name in _HYBRID else (),
            max_positions=max_positions,
            rotary_dim=rotary_dim,
            recurrent=_read_recurrent(fields) if name in _HYBRID else None,
            moe=moe,
        )


def is_draft(path: str | Path) -> bool:
    """Whether a GGUF file says that it is a DFlash draft, of any family of writers, known or not."""
    name = read_file(path).metadata.get("general.architecture")
    return isinstance(name, str) and ("dflash" in name or "dspark" in name)


def _section(file: GGUFFile, name: str) -> Fields:
    """The metadata whose keys begin with `name.`"""
    prefix = f"{name}."
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    return Fields(file.path, values, name)


def _architecture(file: GGUFFile) -> str:
    fields = Fields(file.path, file.metadata)
    name = fields.text("general.architecture")
    if name in DRAFTS:
        raise ConfigError(
            f"{file.path}: this is a DFlash draft ('{name}', written by {DRAFTS[name]}), not a target: "
            "pass it as the draft"
        )
    if name not in ARCHITECTURES:
        raise fields.error(
            "general.architecture",
            f"is '{name}': targets can be {', '.join(ARCHITECTURES)}",
        )
    shards = fields.integer("split.count", 1)
    if shards > 1:
        raise fields.error("split.count", f"is {shards}: join the parts first (llama-gguf-split --merge)")
    return name


def _depth(fields: Fields, tensors: int) -> int:
    """Layers of the model itself: the blocks after them predict further tokens (multi-token prediction)."""
    blocks = fields.integer("block_count", most=min(MAX_LAYERS, tensors))
    extra = fields.integer("nextn_predict_layers", 0)
    if extra and extra >= blocks:
        raise fields.error("nextn_predict_layers", f"is {extra} of {blocks} blocks: no layers remain")
    return blocks - extra


def _kv_heads(fields: Fields, heads: int) -> int:
    """One number, or one a block with 0 where there is no attention, as some writers of hybrids have it."""
    key = "attention.head_count_kv"
    named = fields.get(key, heads)
    if not isinstance(named, np.ndarray):
        return fields.integer(key, heads)
    counts = {int(count) for count in named if count}
    if len(counts) != 1:
        raise fields.error(key, f"names {sorted(counts)}: one number for all attention layers is supported")
    return counts.pop()


def _intermediate_size(fields: Fields, name: str, moe: MoeConfig | None) -> int:
    """Qwen3.5's routed models have no dense MLP anywhere: the experts' size stands for it."""
    if name == "qwen35moe" and moe is not None:
        return moe.intermediate_size
    return fields.integer("feed_forward_length")


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Which layers are recurrent: a flag for each, or all but every n-th."""
    key = "attention.recurrent_layers"
    flags = fields.get(key, None)
    if flags is None:
        interval = fields.integer("full_attention_interval", 4)
        if interval == 0:
            raise fields.error("full_attention_interval", "is 0: it must be positive")
        return tuple(RECURRENT if (i + 1) % interval else FULL for i in range(layers))
    if not isinstance(flags, np.ndarray) or flags.dtype != bool or len(flags) < layers:
        raise fields.error(key, f"must be a flag for each of {layers} layers")
    return tuple(RECURRENT if flag else FULL for flag in flags[:layers])


def _read_recurrent(fields: Fields) -> RecurrentConfig:
    heads = fields.integer("ssm.time_step_rank")
    inner = fields.integer("ssm.inner_size")
    if heads == 0 or inner % heads:
        raise fields.error("ssm.inner_size", f"is {inner}, not a multiple of {heads} value heads")
    return RecurrentConfig(
        key_heads=fields.integer("ssm.group_count"),
        value_heads=heads,
        key_dim=fields.integer("ssm.state_size"),
        value_dim=inner // heads,
        conv_width=fields.integer("ssm.conv_kernel"),
    )


def _read_moe(fields: Fields, name: str, layers: int) -> MoeConfig:
    """llama.cpp routes every layer of these architectures and always normalises the weights; only qwen35moe
    has a shared expert."""
    shared = fields.integer("expert_shared_feed_forward_length") if name == "qwen35moe" else 0
    return MoeConfig(
        experts=fields.integer("expert_count"),
        per_token=fields.integer("expert_used_count"),
        intermediate_size=fields.integer("expert_feed_forward_length"),
        layers=(True,) * layers,
        shared_intermediate_size=shared,
        normalise=True,
    )


def _head_dim(fields: Fields, hidden: int, heads: int, partial: bool) -> tuple[int, int]:
    """Sizes of a head and of what rotates of it (all, unless `partial`). An absent key_length means
    embedding_length / head_count, by the GGUF specification."""
    if heads == 0:
        raise fields.error("attention.head_count", "is 0: it must be positive")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    values = fields.integer("attention.value_length", head_dim)
    if values != head_dim:
        raise fields.error("attention.value_length", f"is {values}, keys have {head_dim}: not supported")
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not partial:
        raise fields.error(
            "rope.dimension_count", f"is {rotated}, not all {head_dim} of a head: not supported"
        )
    return head_dim, rotated


def _refuse_window(fields: Fields, max_positions: int) -> None:
    window = fields.integer("attention.sliding_window", 0)
    if window and not 0 < max_positions <= window:
        raise fields.error("attention.sliding_window", f"is {window}: not supported in GGUF targets")


def _divisors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...]:
    """llama3 scaling, as one divisor for each frequency."""
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.decode is None or tensor.shape != (rotary_dim // 2,):
        raise ConfigError(
            f"{file.path}: {ROPE_FREQS} is {list(tensor.shape)}, expected [{rotary_dim // 2}] floats"
        )
    values = tensor.rows(0, len(tensor.raw)).ravel()
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"{file.path}: {ROPE_FREQS} must hold positive numbers")
    return tuple(float(value) for value in values)


def load_target(
    path: str | Path, config: TargetConfig, abstract: Mapping[str, Any], dtype: DTypeLike
) -> dict[str, Any]:
    """Parameters of a target, dequantised to numpy arrays in `dtype` and shaped as `abstract`
    (targets.abstract_params), as a Hugging Face checkpoint would hold them.

    Raises one ConfigError that lists all missing, unknown and misshapen tensors.
    """
    file = read_file(path)
    _architecture(file)
    found = restored(file, config)
    return load(file.path, found, expected(found, config, abstract), dtype, problems(found))


def check_target(path: str | Path, config: TargetConfig, abstract: Mapping[str, Any]) -> None:
    """The errors of load_target, from the file's header and its smallest tensors alone."""
    file = read_file(path)
    _architecture(file)
    found = restored(file, config)
    check(file.path, found, expected(found, config, abstract), problems(found))
